"""One training run: Megatron's loop with our providers."""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from mcore_qwen3vl.model.flops import Trained
from mcore_qwen3vl.runtime.cuda import compile_where_possible, order_transfers
from mcore_qwen3vl.runtime.lock import only_writer
from mcore_qwen3vl.training.arguments.checks import check_device
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.defaults import statement
from mcore_qwen3vl.training.arguments.early import check_early
from mcore_qwen3vl.training.arguments.help import asked_words, print_megatron_help
from mcore_qwen3vl.training.arguments.parser import parse
from mcore_qwen3vl.training.logs import metrics
from mcore_qwen3vl.training.logs.progress import RunProgress
from mcore_qwen3vl.training.logs.quiet import quiet
from mcore_qwen3vl.training.owner import claim
from mcore_qwen3vl.training.refused import nothing_left

_NO_NUMBER = "in local grad norm for bucket"
"""What Megatron's check of the gradients says, which does not name the step as its log does."""


def main(command: CommandLine) -> int:
    """Train as the command line says; every rank calls this.

    Returns:
        0, or 128 + N when signal N has stopped this rank.

    Raises:
        BadInput: the flags, the data or the checkpoint cannot be used, or another run saves there.
    """
    words = asked_words(command.words)
    if words is not None:
        _choose_device(cpu=True)
        print_megatron_help(words)
    check_early(command)
    run: Run | None = None
    with nothing_left(command, lambda: bool(run and run.begun)), quiet(command) as screen:
        _choose_device(command.cpu)
        args, explicit = parse(command)
        run = Run(args, screen)
        if args.rank == 0:
            run.introduce(screen, explicit)
        with ExitStack() as locks:
            if args.rank == 0:
                _lock(args, locks)
            return run.train()


def _lock(args: argparse.Namespace, locks: ExitStack) -> None:
    """Lock the folders that this run writes to against other runs."""
    for folder in {Path(place).resolve() for place in (args.save, args.save_hf) if place}:
        folder.mkdir(parents=True, exist_ok=True)
        locks.enter_context(only_writer(folder))


def _choose_device(cpu: bool) -> None:
    """Prepare for the CPU or for GPUs; must run before megatron is imported."""
    if cpu:
        # Warnings of megatron and torch about missing CUDA extensions do not matter here.
        warnings.filterwarnings("ignore", module="megatron")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        from mcore_qwen3vl.runtime.cpu import install

        install(training=True)
    else:
        check_device(cpu=False)
        order_transfers()
        compile_where_possible()


class Run:
    """The state of a run that Megatron's loop does not hold."""

    def __init__(self, args: argparse.Namespace, screen: Console | None) -> None:
        """
        Args:
            args: the arguments that :func:`mcore_qwen3vl.training.arguments.parser.parse` returns.
            screen: the terminal from :func:`mcore_qwen3vl.training.logs.quiet.quiet`, or None.
        """
        from mcore_qwen3vl.config import Architecture
        from mcore_qwen3vl.training.broadcast.provider import DataProvider
        from mcore_qwen3vl.training.checkpoints.best import Validations
        from mcore_qwen3vl.training.checkpoints.resume import from_other_maker
        from mcore_qwen3vl.training.host_copy import NormCheck
        from mcore_qwen3vl.training.lora.lora_run import LoraRun

        self.args = args
        self.architecture = Architecture.from_hf(args.hf_model)
        self.lora = LoraRun.of(args, self.architecture)
        self.other = from_other_maker(args)
        self.metrics = metrics.Metrics(self.architecture, peak_tflops=args.peak_tflops)
        self.data = DataProvider(args, self.architecture, self.metrics.count)
        self.forward_step = _forward_step(args)
        self.last_report: dict[str, float] = {}
        self.norms = NormCheck(self.forward_step.records.explain)
        self.validations = Validations(args)
        self._validated_at = -1
        self._new_validation = True
        self._interrupted = False
        self.begun = False
        self._on_disk: tuple[str, int] | None = None
        # The last rank shows progress, as with Megatron's own log: it knows the loss.
        last = args.rank == args.world_size - 1
        self.progress = RunProgress(screen if last else None)

    def introduce(self, screen: Console | None, explicit: Collection[str]) -> None:
        """Print what the run will do; one rank calls this."""
        from mcore_qwen3vl.training.logs.summary import show_summary

        taken = statement(self.args, explicit)
        if screen is not None:
            show_summary(screen, self.args, self.architecture, explicit, self.lora, self.other)
        elif taken:
            print(f"not given, so: {taken}", file=sys.stderr, flush=True)

    def train(self) -> int:
        """Call ``megatron.training.pretrain``.

        Returns:
            0, or 128 + N when signal N has stopped this rank.
        """
        self._interrupt_as_sigterm()
        with self.progress as progress:
            try:
                with metrics.explained_tensorboard(self.args.tensorboard_dir):
                    self._pretrain()
                self.data.close()
            except RuntimeError as error:
                if _NO_NUMBER not in str(error):
                    raise
                step = self.args.curr_iteration + 1
                raise self.forward_step.records.explain(step) from error
            except SystemExit as leaving:  # Megatron's way out when a signal or a limit stops it
                if leaving.code:
                    raise
                stopped = self._stopped_by()
                if self.validations.exhausted and not stopped:
                    progress.say(f"stopped early after step {progress.steps}: {self.validations}")
                    return 0
                again = ": run the same command again to continue" if self.args.save else ""
                progress.say(f"stopped after step {progress.steps}{again}")
                return stopped
            if self.validations.best:
                progress.say(str(self.validations))
            progress.say(
                f"done: step {progress.steps}, {progress.elapsed}"
                if progress.steps
                else f"nothing left to do: {self.args.load} has all of its steps"
            )
        return 0

    def _interrupt_as_sigterm(self) -> None:
        """Make Ctrl-C act as SIGTERM, after which the rank saves.

        Ctrl-C reaches every process of the terminal. The data workers, which are forked and inherit
        the handler, ignore it and go on until the rank ends them.
        """
        rank = os.getpid()

        def handler(*_: Any) -> None:
            if os.getpid() == rank:
                self._interrupted = True
                self.progress.say("stopping after the next step")
                signal.raise_signal(signal.SIGTERM)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)

    def _stopped_by(self) -> int:
        """Return 128 + N if signal N stopped the run, or 0 if a limit did."""
        from megatron.training.global_vars import get_signal_handler

        if self._interrupted:
            return 128 + signal.SIGINT
        received = getattr(get_signal_handler(), "_signal_received", False)
        return 128 + signal.SIGTERM if received else 0

    def _pretrain(self) -> None:
        from megatron.core.enums import ModelType
        from megatron.training import pretrain
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        from mcore_qwen3vl.converters.torch_dist.metadata import guard_reads
        from mcore_qwen3vl.training.hooks import wrap_all
        from mcore_qwen3vl.training.model import model_provider
        from mcore_qwen3vl.training.step import multi_tensor

        multi_tensor.install()
        guard_reads()
        wrap_all(self._wrappers())
        pretrain(
            pretrain_cfg_container_from_args(self.args),
            self.data,
            ModelType.encoder_or_decoder,
            self.forward_step,
            model_provider=model_provider(
                self.args,
                self.architecture,
                self.lora,
                self._note_trained,
                self.other,
                # Not a method: Megatron deep-copies the config, and with it a method's object.
                finalize_model_grads_func=lambda *args, **kw: self._finalize_gradients(*args, **kw),
            ),
        )

    def _wrappers(self) -> dict[str, Any]:
        """Return what wraps each function of :data:`mcore_qwen3vl.training.hooks.HOOKS`."""
        from mcore_qwen3vl.training import hooks
        from mcore_qwen3vl.training.lora.lora_run import keep_trained
        from mcore_qwen3vl.training.step.gradients import reduce_in_pieces

        args = self.args
        return {
            "get_write_results_queue": hooks.unchanged if args.async_save else hooks.results_queue,
            "compile_helpers": lambda original: None,
            "all_gather_item": hooks.Signals().gather,
            "_allreduce_non_tensor_model_parallel_grads": reduce_in_pieces,
            "generate_state_dict": keep_trained if self.lora else hooks.unchanged,
            "load_checkpoint": self._load_checkpoint,
            "check_checkpoint_args": self._compare_parts,
            "save_checkpoint_and_time": self._save_checkpoint,
            "checkpoint_and_decide_exit": self._after_iteration,
            "dummy_train_step": hooks.skip_step,
            "evaluate_and_print_results": self._validate,
            "evaluate": self._evaluate,
            "training_log": self._log,
            "get_megatron_optimizer_config": self._optimizer_config,
            "get_megatron_optimizer": self._optimizer,
            "reduce_max_stat_across_model_parallel_group": hooks.Stats().reduce,
            "logical_and_across_model_parallel_group": partial(
                hooks.success_of_all, fp16=args.fp16
            ),
            "get_forward_backward_func": _schedule(args),
        }

    def _note_trained(self, trained: Trained) -> None:
        self.metrics.trained = self.data.trained = trained

    def _load_checkpoint(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from mcore_qwen3vl.training.checkpoints.optimizer import check_state_of_weights
        from mcore_qwen3vl.training.checkpoints.resume import choose_checkpoint, explained
        from mcore_qwen3vl.training.lora.lora_run import check_checkpoint

        check_checkpoint(self.args, self.lora)
        if self.other:  # the provider has read it
            return 0, 0
        choose_checkpoint(self.args)
        with explained(self.args):
            found = original(model, *args, **kwargs)
        optimizer = args[0] if args else kwargs.get("optimizer")
        if found[0] and optimizer is not None:
            check_state_of_weights(optimizer, self.args.load)
        if found[0]:
            self._on_disk = self.args.load, found[0]
            self.validations.resume(found[0])
            if self.validations.exhausted:
                self.args.train_iters = found[0]
            self.progress.say(f"resuming after step {found[0]} of {self.args.load}")
        if found[0] and found[0] == self.args.train_iters and self._lacks_export(found[0]):
            self._export(model, optimizer, found[0])
        return found

    def _compare_parts(self, original: Any, saved: argparse.Namespace, **kwargs: Any) -> None:
        from mcore_qwen3vl.training.checkpoints.resume import other_parts

        original(saved, **kwargs)
        if difference := other_parts(saved, self.args):
            self.progress.say(difference)

    def _lacks_export(self, iteration: int) -> bool:
        from mcore_qwen3vl.training.checkpoints.export import export_folder

        return bool(self.args.save_hf) and not export_folder(self.args, iteration).exists()

    def _export(self, model: Any, optimizer: Any, iteration: int) -> None:
        from mcore_qwen3vl.training.checkpoints.export import export

        self.norms.settle()
        if self.args.rank == 0:
            claim(self.args.save, self.args.save_hf)
        with self.metrics.paused():
            folder = export(self.args, model, optimizer, iteration, self.lora)
        self.progress.say(f"step {iteration}: exported to {folder}")

    def _save_checkpoint(self, original: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
        import torch.distributed as dist

        from mcore_qwen3vl.training.broadcast import data_state
        from mcore_qwen3vl.training.checkpoints.disk import explained_save
        from mcore_qwen3vl.training.checkpoints.resume import save_companions

        # Already saved: the run had nothing left to do, or its last step was its best.
        if (self.args.save, iteration) == self._on_disk:
            return
        self.norms.settle()
        with self.metrics.paused(), explained_save(self.args.save, iteration):
            if dist.get_rank() == 0:
                save_companions(self.args)
            if self.lora:
                self.lora.save_config()
            self.data.save_state(self.args.save, iteration)
            original(iteration, *args, **kwargs)
            if self.args.save_retain_interval and dist.get_rank() == 0:
                data_state.remove_orphans(self.args.save, iteration)
        self._on_disk = self.args.save, iteration
        self.progress.say(f"step {iteration}: saved to {self.args.save}")

    def _validate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        # Megatron validates once more at the end, even right after the last interval.
        self._new_validation = given["iteration"] != self._validated_at
        self._validated_at = given["iteration"]
        with self.metrics.paused():
            return original(*args, **kwargs)

    def _evaluate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        import torch
        from megatron.training.utils import is_last_rank

        found = original(*args, **kwargs)
        losses = found[0]
        iteration = self._validated_at
        if losses is not None:  # None if the run's time was up meanwhile
            # Megatron writes these to its logs as its own.
            parts = self.forward_step.validation_sets.report()
            losses |= {name: torch.tensor(value) for name, value in parts.items()}
            self.validations.add(iteration, losses)
            # The last validation follows the last save.
            if self._on_disk == (self.args.save, iteration):
                self.validations.keep(iteration)
        if losses and self._new_validation and is_last_rank():
            numbers = {f"validation {name}": float(loss) for name, loss in losses.items()}
            listing = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
            self.progress.say(f"step {iteration}: {listing}")
            if self.args.log_json:
                metrics.append_json(self.args.log_json, {"iteration": iteration, **numbers})
        return found

    def _after_iteration(
        self, original: Any, model: Any, optimizer: Any, scheduler: Any, iteration: int, *rest: Any
    ) -> bool:
        with self.validations.due(iteration):
            leaving: bool = original(model, optimizer, scheduler, iteration, *rest)
        self.validations.keep(iteration)
        interval = self.args.save_hf_interval
        last = iteration == self.args.train_iters or self.validations.exhausted
        due = last or (interval and iteration % interval == 0)
        if self.args.save_hf and due:
            self._export(model, optimizer, iteration)
        return leaving

    def _optimizer_config(self, original: Any, args: argparse.Namespace) -> Any:
        from mcore_qwen3vl.training.step.optimizer import learning_rate_overrides

        config, overrides = original(args)
        return config, {**(overrides or {}), **learning_rate_overrides(args)}

    def _optimizer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        from mcore_qwen3vl.training.checkpoints.experts import take_other_chains
        from mcore_qwen3vl.training.checkpoints.optimizer import keep_own_parts
        from mcore_qwen3vl.training.step.multi_tensor import use_fused_adam
        from mcore_qwen3vl.training.step.optimizer import make_resumable, scale_on_host

        optimizer = original(*args, **kwargs)
        use_fused_adam(optimizer)
        make_resumable(optimizer)
        keep_own_parts(optimizer)
        take_other_chains(optimizer)
        scale_on_host(optimizer)
        return optimizer

    def _finalize_gradients(
        self, model: list[Any], num_tokens: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Finalize gradients as Megatron does, divide them by our normaliser, and report norms.

        Megatron's own `num_tokens` must be an integer, which a sum of weights is not.
        """
        from megatron.core.distributed import finalize_model_grads

        self.begun = True
        finalize_model_grads(model, None, *args, **kwargs)
        self.forward_step.normalise(model)
        iteration = self.args.curr_iteration + 1
        self.forward_step.records.finish(iteration)
        if iteration % self.args.log_interval == 0:
            self._report(model, iteration)

    def _log(
        self,
        original: Any,
        losses: Any,
        totals: Any,
        rate: Any,
        iteration: int,
        *rest: Any,
        **kw: Any,
    ) -> Any:
        from megatron.training.utils import is_last_rank

        signature = inspect.signature(original)
        given = signature.bind(losses, totals, rate, iteration, *rest, **kw).arguments
        due = iteration % self.args.log_interval == 0
        self._check_norm(given["grad_norm"], iteration, now=due)
        if losses and is_last_rank():  # Megatron's own log is the last rank's too
            self.progress.step(iteration, self.args.train_iters)
            if due or given.get("is_first_iteration"):
                numbers: dict[str, Any] = {n: float(loss) for n, loss in losses.items()}
                norm = given["grad_norm"]
                numbers |= {"grad norm": None if norm is None else float(norm)}
                numbers |= {"learning rate": rate}
                numbers |= self.last_report if due else {}
                self.progress.show(iteration, numbers)
                if due and self.args.log_json:
                    metrics.append_json(self.args.log_json, {"iteration": iteration, **numbers})
        return original(losses, totals, rate, iteration, *rest, **kw)

    def _check_norm(self, norm: Any, iteration: int, *, now: bool) -> None:
        """Check the norm, a step late unless `now`. In fp16 the loss scaler skips such steps."""
        if self.args.fp16:
            return
        self.norms.add(norm, iteration)
        if now:
            self.norms.settle()

    def _report(self, model: list[Any], iteration: int) -> None:
        from megatron.core import parallel_state
        from megatron.training import get_tensorboard_writer, get_wandb_writer
        from megatron.training.utils import print_rank_last

        from mcore_qwen3vl.training.logs.grad_norms import part_grad_norms

        report = self.metrics.report(parallel_state.get_data_parallel_group())
        norms = part_grad_norms(model)
        report |= {f"grad norm {part}": float(norm) for part, norm in norms.items()}
        report |= self.forward_step.data_sets.report()
        self.last_report = report
        metrics.write(report, iteration, get_tensorboard_writer(), get_wandb_writer())
        print_rank_last(metrics.line(report))


def _schedule(args: argparse.Namespace) -> Any:
    """Return what replaces ``get_forward_backward_func``: some losses take two passes in a step."""
    from mcore_qwen3vl.training import hooks
    from mcore_qwen3vl.training.preference.flags import is_kto, is_preference, reference_of
    from mcore_qwen3vl.training.preference.reference import with_baseline, with_reference
    from mcore_qwen3vl.training.tasks.contrastive import with_contrasts
    from mcore_qwen3vl.training.tasks.flags import contrastive_of, is_embedding

    if is_embedding(args):
        return partial(with_contrasts, contrastive_of(args))
    if is_preference(args) and reference_of(args) == "adapter":
        return with_reference
    if is_kto(args):
        return with_baseline
    return hooks.unchanged


def _forward_step(args: argparse.Namespace) -> Any:
    """Return the forward step with the objective that the run minimises."""
    from mcore_qwen3vl.data.loading.sources import parse_sources, source_names
    from mcore_qwen3vl.training.distillation.flags import distillation_of, is_distillation
    from mcore_qwen3vl.training.distillation.objective import compared, of_divergences
    from mcore_qwen3vl.training.preference.flags import (
        is_kto,
        is_preference,
        kto_of,
        preference_of,
    )
    from mcore_qwen3vl.training.preference.objective import of_labelled, of_pairs
    from mcore_qwen3vl.training.step.forward import ForwardStep
    from mcore_qwen3vl.training.step.losses import find_loss, of_tokens
    from mcore_qwen3vl.training.tasks.objectives import objective_of

    step = partial(
        ForwardStep,
        data_sets=source_names(parse_sources(args.train_data_path or args.data_path)),
        validation_sets=source_names(
            parse_sources(args.valid_data_path) if args.valid_data_path else ()
        ),
    )
    if args.task:
        return step(*objective_of(args))
    if is_preference(args):
        return step(of_pairs(preference_of(args)))
    if is_kto(args):
        return step(of_labelled(kto_of(args)))
    if is_distillation(args):
        settings = distillation_of(args)
        return step(of_divergences(settings), compared(settings))
    return step(of_tokens(find_loss(args.loss)))
