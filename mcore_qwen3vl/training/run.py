"""One training run: Megatron's loop with our providers."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from mcore_qwen3vl.console import print_unused, visible
from mcore_qwen3vl.errors import Unfinished
from mcore_qwen3vl.model.flops import Trained
from mcore_qwen3vl.runtime.device import prepare_device
from mcore_qwen3vl.settings.schedule import ITERS
from mcore_qwen3vl.training.arguments.checks import check_early, require_gpu
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.help import help_words, print_megatron_help
from mcore_qwen3vl.training.arguments.parser import (
    Parsed,
    is_about_flags,
    parse,
    refusal,
    without_help_texts,
)
from mcore_qwen3vl.training.arguments.settings import statement_of_defaults
from mcore_qwen3vl.training.arguments.unused import unused_data_flags, unused_rates
from mcore_qwen3vl.training.events import FINALIZE, FORWARD_BACKWARD, LOG, Built, RunObserver
from mcore_qwen3vl.training.folders import lock_folders
from mcore_qwen3vl.training.logs import metrics
from mcore_qwen3vl.training.logs.record_log import RecordLog
from mcore_qwen3vl.training.logs.terminal import RunProgress, quiet
from mcore_qwen3vl.training.logs.trackers import Trackers
from mcore_qwen3vl.unused.fields import Unused, sentences

_LOOP = "train"
"""Megatron's function that leaves a run at a signal or a limit."""
_NO_NUMBER = "in local grad norm for bucket"
"""What Megatron's check of the gradients says, which does not name the step as its log does."""
_NO_STEP: tuple[Any, ...] = {}, 1, False, False, 0, None, None, 0
"""What Megatron's ``train_step`` returns of a step without a loss and without an update."""


def main(
    command: CommandLine, observer: RunObserver | None = None, *, rehearsed: bool = False
) -> int:
    """Train as the command line says; every rank calls this.

    Args:
        observer: hears of the run's events.
        rehearsed: only memory and work matter, and this rank is the only one there is. It reads its
            own batches on each pipeline stage, accepts names in ``--freeze`` that match nothing on
            its stage, leaves the second model's weights as they are made, needs neither DeepEP nor
            FlashAttention 3, and logs no step for being the last.

    Returns:
        0, or 128 + N when signal N has stopped this rank.

    Raises:
        BadInput: the flags, the data or the checkpoint cannot be used, or another run saves there.
    """
    words = help_words(command.words)
    if words is not None:
        _choose_device(cpu=True)
        print_megatron_help(words)
    check_early(command, rehearsed=rehearsed)
    if os.environ.get("RANK", "0") == "0":
        print_unused(command.unused())
    with quiet(command) as screen:
        overlap = "--overlap-moe-expert-parallel-comm" in command.words
        _choose_device(command.cpu, several_queues=overlap)
        with without_help_texts():
            parsed = parse(command)
            run = Run(parsed, screen, observer or RunObserver(), rehearsed=rehearsed)
            settings, first = parsed.settings, parsed.settings.parallel.rank == 0
            if first:
                run.introduce(screen, parsed.explicit)
            with lock_folders([settings.checkpoints.save, settings.model.save_hf] if first else []):
                return run.train()


def _choose_device(cpu: bool, *, several_queues: bool = False) -> None:
    """Prepare for the CPU or for GPUs; must run before megatron is imported."""
    if cpu:
        # Warnings of megatron and torch about missing CUDA extensions do not matter here.
        warnings.filterwarnings("ignore", module="megatron")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        # Threads that wait for each other make small steps many times slower on a busy machine.
        if os.environ.setdefault("OMP_NUM_THREADS", "1") == "1":
            torch.set_num_threads(1)  # torch reads the variable once, and was imported before
    else:
        require_gpu()
    prepare_device(cpu=cpu, training=True, several_queues=several_queues)


class Run:
    """The state of a run that Megatron's loop does not hold."""

    def __init__(
        self, parsed: Parsed, screen: Console | None, observer: RunObserver, *, rehearsed: bool
    ) -> None:
        from mcore_qwen3vl.config import Architecture
        from mcore_qwen3vl.training.checkpoints.other_maker import checkpoint_of_other_maker
        from mcore_qwen3vl.training.checkpoints.run_checkpoints import RunCheckpoints
        from mcore_qwen3vl.training.contract.resuming import Contract
        from mcore_qwen3vl.training.data_provider import DataProvider
        from mcore_qwen3vl.training.hooks import NormCheck
        from mcore_qwen3vl.training.logs.step_report import StepReport
        from mcore_qwen3vl.training.lora import LoraRun
        from mcore_qwen3vl.training.objectives import forward_step_of
        from mcore_qwen3vl.training.second_model import SecondModel

        self.settings = settings = parsed.settings
        self._replaced = parsed.replaced
        self.args = parsed.args  # Megatron's, which its loop changes while it runs
        self.observer = observer
        self._rehearsed = rehearsed
        self.architecture = Architecture.from_hf(settings.model.folder)
        self.second = SecondModel.from_settings(settings, self.architecture)
        self.lora = LoraRun.from_settings(settings, self.architecture)
        checkpoints = settings.checkpoints
        if self.lora:  # its base is no checkpoint of this run
            checkpoints = replace(checkpoints, pretrained_checkpoint=None)
        self.other = checkpoint_of_other_maker(checkpoints)
        self.metrics = metrics.Metrics(
            self.architecture,
            peak_tflops=settings.training.peak_tflops,
            mtp=bool(settings.loop.mtp_num_layers),
        )
        self.records = RecordLog(settings.training.log_records)
        self.forward_step = forward_step_of(settings)
        self.norms = NormCheck(self.forward_step.records.explain)
        self._interrupted = False
        # The last rank shows progress, as with Megatron's own log: it knows the loss.
        last = settings.parallel.rank == settings.parallel.world_size - 1
        self.progress = RunProgress(screen if last else None)
        self._trackers = Trackers(settings.training.log_to if last else ())
        self.report = StepReport(
            settings,
            self.args,
            self.forward_step,
            metrics=self.metrics,
            norms=self.norms,
            progress=self.progress,
            trackers=self._trackers,
            rehearsed=rehearsed,
        )
        self.data = DataProvider(
            settings,
            self.architecture,
            on_batch=(observer.batch, self.metrics.count, self.records.count),
            on_validation_batch=(self.report.left_out.count,),
            reads_on_every_stage=rehearsed,
        )
        self._given = {name: getattr(parsed.args, name, None) for name in parsed.explicit}
        self.contract = Contract(self.args, settings, self.progress.say)
        self.checkpoints = RunCheckpoints(self)

    def introduce(self, screen: Console | None, explicit: Collection[str]) -> None:
        """Print what the run will do; one rank calls this."""
        from mcore_qwen3vl.training.logs.summary import rounded_text, show_summary, summary

        taken = statement_of_defaults(self.settings, explicit)
        unused = sentences(
            [
                *unused_data_flags(self.settings, explicit),
                *self._unused_of_files(),
                *unused_rates(self._replaced),
            ]
        )
        if screen is not None:
            rows = summary(self.settings, self.architecture, explicit, self.lora, self.other)
            names = [("not used", sentence.removeprefix("not used ")) for sentence in unused]
            show_summary(screen, [*rows, *names])
            return
        said = {"not given, so": taken, "rounded": rounded_text(self.settings)}
        said_words = [f"{name}: {visible(text)}" for name, text in said.items() if text]
        for sentence in [*said_words, *map(visible, unused)]:
            print(sentence, file=sys.stderr, flush=True)

    def _unused_of_files(self) -> list[Unused]:
        """Return what the run does not use of its models' files and of its adapters' configs."""
        from mcore_qwen3vl.converters.adapters.adapter import unused_of_adapter
        from mcore_qwen3vl.training.second_model import folder_of
        from mcore_qwen3vl.unused.folder import unused_of

        settings, model = self.settings, self.settings.model.folder
        folders = filter(None, (model, folder_of(settings)))
        adapters = filter(None, (settings.lora.lora_init, settings.lora.lora_config))
        return [
            *(unused for folder in folders for unused in unused_of(folder)),
            *(unused for file in adapters for unused in unused_of_adapter(file, model)),
        ]

    def train(self) -> int:
        """Train, and send the numbers to trackers; return 0, or 128 + N if signal N stopped it."""
        training, exit_code = self.settings.training, 1
        self._trackers.begin(training.log_project, training.log_run, self._given)
        try:
            exit_code = self._train()
        finally:
            self._trackers.finish(exit_code)
        return exit_code

    def _train(self) -> int:
        """Call ``megatron.training.pretrain``; return 0, or 128 + N if signal N stopped it."""
        self._save_at_ctrl_c()
        validations = self.checkpoints.validations
        with closing(self.progress) as progress:
            try:
                with metrics.explain_tensorboard_errors(self.settings.logs.tensorboard_dir):
                    self._pretrain()
                self.data.close()
            except (AssertionError, ValueError, RuntimeError) as error:
                if is_about_flags(error):
                    raise refusal(error) from error
                if _NO_NUMBER not in str(error):
                    raise
                step = self.args.curr_iteration + 1
                raise self.forward_step.records.explain(step) from error
            except SystemExit as leaving:  # Megatron's way out when a signal or a limit stops it
                if leaving.code:
                    raise
                if self.args.ckpt_convert_format:
                    progress.say(f"converted the checkpoint: {self.args.ckpt_convert_save}")
                    return 0
                if (where := traceback.extract_tb(leaving.__traceback__)[-1].name) != _LOOP:
                    # Errors end there too, with exit code 0, as when a checkpoint cannot be read.
                    raise Unfinished(
                        f"Megatron-Core ended the run in its {where}, before it trained: with "
                        "--verbose it says why."
                    ) from leaving
                stopped = self._signal_exit_code()
                if validations.is_exhausted and not stopped:
                    progress.say(f"stopped early after step {progress.steps}: {validations}")
                    return 0
                if self.report.skips:
                    progress.say(str(self.report.skips))
                saves = self.settings.checkpoints.save
                again = ": run the same command again to continue" if saves else ""
                progress.say(f"stopped after step {progress.steps}{again}")
                return stopped
            if validations.best:
                progress.say(str(validations))
            if self.report.skips:
                progress.say(str(self.report.skips))
            progress.say(self._end_of_run())
        return 0

    def _end_of_run(self) -> str:
        """Say what a run that was not stopped has done."""
        progress, trains = self.progress, not self.settings.loop.skip_train
        if trains and not progress.steps:
            return f"nothing left to do: {self.settings.checkpoints.load} has all of its steps"
        return f"done: {f'step {progress.steps}' if trains else 'validated'}, {progress.elapsed}"

    def _save_at_ctrl_c(self) -> None:
        """Make Ctrl-C act as the signal after which Megatron saves: SIGTERM, or --exit-signal.

        Ctrl-C reaches every process of the terminal. The data workers, which are forked and inherit
        the handler, ignore it and go on until the rank ends them.
        """
        rank, exit_signal = os.getpid(), self.args.exit_signal
        if exit_signal == signal.SIGINT:
            return  # Megatron has its own handler for it, which the data workers inherit too

        def save_and_stop(*_: Any) -> None:
            if os.getpid() == rank:
                self._interrupted = True
                self.progress.say("stopping after the next step")
                signal.raise_signal(exit_signal)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, save_and_stop)

    def _signal_exit_code(self) -> int:
        """Return 128 + N if signal N stopped the run, or 0 if a limit did."""
        from megatron.training.global_vars import get_signal_handler

        if self._interrupted:
            return 128 + signal.SIGINT
        received = getattr(get_signal_handler(), "_signal_received", False)
        return 128 + self.args.exit_signal if received else 0

    def _pretrain(self) -> None:
        """Call Megatron's loop with our providers and wrappers."""
        from megatron.core.enums import ModelType
        from megatron.training import pretrain
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        from mcore_qwen3vl.converters.torch_pickle import guard_reads
        from mcore_qwen3vl.runtime.flash_attention import use_flash_attention_3
        from mcore_qwen3vl.training.hooks import wrap_all
        from mcore_qwen3vl.training.model import model_provider
        from mcore_qwen3vl.training.optimizer import use_multi_tensor

        if self.settings.compute.flash_attention_version == 3 and not self._rehearsed:
            use_flash_attention_3()
        use_multi_tensor()
        guard_reads()
        wrap_all(self._wrappers())
        pretrain(
            pretrain_cfg_container_from_args(self.args),
            self.data,
            ModelType.encoder_or_decoder,
            self.forward_step,
            model_provider=model_provider(
                self.settings,
                self.architecture,
                self.args,
                self.lora,
                self._note_trained,
                self.other,
                every_stage_is_here=not self._rehearsed,
                # Not a method: Megatron deep-copies the config, and with it a method's object.
                finalize_model_grads_func=lambda *args, **kw: self._finalize_gradients(*args, **kw),
            ),
        )

    def _wrappers(self) -> dict[str, Any]:
        """Return what wraps each function of :data:`.step.HOOKS`, in the order of a run."""
        from mcore_qwen3vl.training import hooks
        from mcore_qwen3vl.training.lora import keep_trained

        settings, checkpoints = self.settings, self.checkpoints
        return {
            "compile_helpers": lambda original: None,
            "get_megatron_optimizer": self._set_up_optimizer,
            "get_optimizer_param_scheduler": self._set_up_rates,
            "load_checkpoint": checkpoints.load,
            "check_checkpoint_args": checkpoints.report_differences,
            "train_step": self._step,
            "get_forward_backward_func": self._make_passes,
            "_allreduce_non_tensor_model_parallel_grads": hooks.reduce_in_pieces,
            "logical_and_across_model_parallel_group": partial(
                hooks.success_of_all, fp16=settings.compute.fp16
            ),
            "reduce_max_stat_across_model_parallel_group": hooks.Stats().maximum,
            "training_log": self._log,
            "evaluate": self._evaluate,
            "checkpoint_and_decide_exit": checkpoints.after_iteration,
            "all_gather_item": hooks.Signals().gather_late,
            "save_checkpoint_and_time": checkpoints.save,
            "generate_state_dict": keep_trained if self.lora else hooks.call_original,
            "get_write_results_queue": (
                hooks.call_original if settings.checkpoints.async_save else hooks.results_queue
            ),
        }

    def _note_trained(self, trained: Trained) -> None:
        """Tell those who count work how much of the model trains."""
        self.metrics.trained = self.data.trained = trained

    def _build_second_model(self) -> None:
        """Build the second model, if there is one."""
        from mcore_qwen3vl.training.model import model_provider

        if self.second:
            self.second.build(model_provider, self.args, reads_weights=not self._rehearsed)

    def _set_up_optimizer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the second model, and then the optimizer; Megatron has built the model."""
        from mcore_qwen3vl.training import optimizer as ours
        from mcore_qwen3vl.training import optimizer_state

        self._build_second_model()
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        rates = ours.learning_rate_overrides(self.settings)
        bound["config_overrides"] = {**(bound.get("config_overrides") or {}), **rates}
        optimizer = original(**bound)
        # Each of these replaces another method or attribute, so they may stand in any order.
        optimizer_state.start_momentum(optimizer)
        ours.use_fused_adam(optimizer)
        optimizer_state.make_resumable(optimizer)
        optimizer_state.keep_own_parts(optimizer)
        optimizer_state.accept_other_chains(optimizer)
        optimizer_state.keep_own_groups(optimizer)
        ours.keep_scale_on_host(optimizer)
        ours.copy_weights_together(optimizer)
        second = self.second.chunks if self.second else []
        self.observer.begin(Built(bound["model_chunks"], optimizer, second, self.data.trained))
        return optimizer

    def _set_up_rates(self, original: Any, optimizer: Any) -> Any:
        """Make the schedule of learning rates, after the run's length is known."""
        from mcore_qwen3vl.training.optimizer import scale_warmup_start

        if self.settings.training.num_epochs:
            self.args.train_iters = steps = self.data.count_steps()  # the end of Megatron's loop
            self.settings.schedule.check_length(steps, ITERS)
        scheduler = original(optimizer)
        scale_warmup_start(scheduler)
        return scheduler

    def _make_passes(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what runs the passes of all micro-batches of a step."""
        from mcore_qwen3vl.training.objectives import passes_of

        passes = passes_of(self.settings, self.second)(original, *args, **kwargs)

        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            with self.observer.during(FORWARD_BACKWARD):
                return passes(*args, **kwargs)

        return forward_backward

    def _step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Train a step, or leave it out."""
        iteration = self.args.curr_iteration + 1
        if self.settings.loop.leaves_out(iteration):
            with self.metrics.leave_out():
                result = self._leave_out(original, *args, **kwargs)
        else:
            result = original(*args, **kwargs)
        self.records.write(iteration)
        self.observer.step(iteration)
        return result

    def _leave_out(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the batches of a step, and change nothing."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        batches = inspect.signature(original).bind(*args, **kwargs).arguments["data_iterator"]
        count = get_num_microbatches()
        for chunk in batches if isinstance(batches, list) else [batches]:
            for _ in range(count):
                next(chunk)
        rows = self.settings.data.micro_batch_size * self.settings.parallel.data_parallel_size
        self.args.skipped_train_samples += count * rows
        return _NO_STEP

    def _finalize_gradients(
        self, model: list[Any], num_tokens: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Finalize gradients as Megatron does, divide them by our normaliser, and report norms."""
        from megatron.core.distributed import finalize_model_grads

        with self.observer.during(FINALIZE):
            # Megatron's own number of tokens must be an integer, which a sum of weights is not.
            finalize_model_grads(model, None, *args, **kwargs)
            self.forward_step.normalise(model)
            iteration = self.args.curr_iteration + 1
            self.forward_step.records.finish(iteration)
            if self.report.is_logged(iteration):
                with self.observer.during(LOG):
                    self.report.measure(model, iteration)

    def _log(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Log a step, with the observer's knowledge."""
        with self.observer.during(LOG):
            return self.report.log_step(original, *args, **kwargs)

    def _evaluate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the losses of a validation, and report them."""
        self._build_second_model()  # with --skip-train there is no optimizer
        config = inspect.signature(original).bind(*args, **kwargs).arguments["config"]
        # A schedule asks the config of the model that it runs; this may be the second model.
        second = [chunk.config for chunk in self.second.chunks] if self.second else []
        with self.metrics.pause(), _variable_lengths([config, *second]):
            result = original(*args, **kwargs)
        self.report.validation(result[0], self.checkpoints.record_validation)
        return result


@contextmanager
def _variable_lengths(configs: Sequence[Any]) -> Iterator[None]:
    """Let pipeline stages exchange batches of any length: a validation's are not packed."""
    before = [config.variable_seq_lengths for config in configs]
    for config in configs:
        config.variable_seq_lengths = True
    try:
        yield
    finally:
        for config, variable in zip(configs, before, strict=True):
            config.variable_seq_lengths = variable
