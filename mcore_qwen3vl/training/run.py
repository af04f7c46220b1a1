"""One training run: Megatron's loop with our providers."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import signal
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from mcore_qwen3vl.training.arguments.checks import check_device
from mcore_qwen3vl.training.arguments.help import asked_words, print_megatron_help
from mcore_qwen3vl.training.arguments.parser import is_cpu, parse
from mcore_qwen3vl.training.logs import metrics


def main(argv: Sequence[str]) -> None:
    """Train as the command line says; every rank calls this.

    Raises:
        BadInput: the flags, the data or the checkpoint cannot be used.
    """
    words = asked_words(argv)
    if words is not None or is_cpu(argv):
        # What megatron misses on CUDA is not missing here.
        warnings.filterwarnings("ignore", module="megatron")
        from mcore_qwen3vl.runtime import cpu

        cpu.install(training=True)  # before megatron is imported
    else:
        check_device(cpu=False)
        # Megatron before Blackwell orders its overlapped transfers by this.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if words is not None:
        print_megatron_help(words)
    args = parse(argv)
    _interrupt_as_sigterm()
    Run(args).train()


def _interrupt_as_sigterm() -> None:
    """Ctrl-C reaches every process of the terminal; this rank then saves as for SIGTERM.

    Its data workers, which are forked and inherit the handler, go on until the rank ends them.
    """
    rank = os.getpid()

    def handler(*_: Any) -> None:
        if os.getpid() == rank:
            signal.raise_signal(signal.SIGTERM)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


class Run:
    """The state of one run that Megatron's loop does not hold."""

    def __init__(self, args: argparse.Namespace) -> None:
        """
        Args:
            args: of :func:`mcore_qwen3vl.training.arguments.parser.parse`.
        """
        from mcore_qwen3vl.config import Architecture
        from mcore_qwen3vl.training.feed.provider import DataProvider
        from mcore_qwen3vl.training.step.forward import ForwardStep
        from mcore_qwen3vl.training.step.losses import find_loss

        self.args = args
        self.architecture = Architecture.from_hf(args.hf_model)
        self.metrics = metrics.Metrics(self.architecture, peak_tflops=args.peak_tflops)
        self.data = DataProvider(args, self.architecture, self.metrics.count)
        self.forward_step = ForwardStep(find_loss(args.loss))
        self.last_report: dict[str, float] = {}

    def train(self) -> None:
        """Call ``megatron.training.pretrain``."""
        from megatron.core.datasets import utils as datasets
        from megatron.core.enums import ModelType
        from megatron.training import dist_signal_handler, pretrain, training
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        from mcore_qwen3vl.training.hooks import gather_items, reduce_stat, wrap
        from mcore_qwen3vl.training.model import model_provider
        from mcore_qwen3vl.training.step import multi_tensor

        multi_tensor.install()

        # Would compile a helper for GPT data sets, which are not used, by a Makefile that
        # megatron-core's wheel lacks; the first rank would exit for it.
        wrap(datasets, {"compile_helpers": lambda original: None})
        # Waits once for the device, not once a rank of the world.
        wrap(dist_signal_handler, {"all_gather_item": gather_items})
        wrap(
            training,
            {
                # First chooses a checkpoint that can be read.
                "load_checkpoint": self._load_checkpoint,
                # First saves where the data stands.
                "save_checkpoint_and_time": self._save_checkpoint,
                # After each iteration: exports to Hugging Face.
                "checkpoint_and_decide_exit": self._after_iteration,
                # Is no part of the speed in our log.
                "evaluate_and_print_results": self._evaluate,
                # Also writes --log-json, and stops at a gradient norm that is no number.
                "training_log": self._log,
                # Adds the learning rates by part.
                "get_megatron_optimizer_config": self._optimizer_config,
                # Waits once for the device.
                "reduce_max_stat_across_model_parallel_group": reduce_stat,
                # Makes torch's Adam fused and resumable.
                "get_megatron_optimizer": self._optimizer,
            },
        )
        pretrain(
            pretrain_cfg_container_from_args(self.args),
            self.data,
            ModelType.encoder_or_decoder,
            self.forward_step,
            model_provider=model_provider(
                self.args, self.architecture, finalize_model_grads_func=self._finalize_gradients
            ),
        )

    def _load_checkpoint(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from mcore_qwen3vl.training.checkpoints.resume import choose_checkpoint, explained

        choose_checkpoint(self.args)
        with explained(self.args.load):
            return original(model, *args, **kwargs)

    def _save_checkpoint(self, original: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
        import torch.distributed as dist

        from mcore_qwen3vl.training.checkpoints.resume import save_companions

        with self.metrics.paused():
            if dist.get_rank() == 0:
                save_companions(self.args)
            self.data.save_state(self.args.save, iteration)
            original(iteration, *args, **kwargs)

    def _evaluate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self.metrics.paused():
            return original(*args, **kwargs)

    def _after_iteration(
        self, original: Any, model: Any, optimizer: Any, scheduler: Any, iteration: int, *rest: Any
    ) -> bool:
        leaving: bool = original(model, optimizer, scheduler, iteration, *rest)
        interval = self.args.save_hf_interval
        due = iteration == self.args.train_iters or (interval and iteration % interval == 0)
        if self.args.save_hf and due:
            from mcore_qwen3vl.training.checkpoints.export import export

            with self.metrics.paused():
                export(self.args, model, optimizer, iteration)
        return leaving

    def _optimizer_config(self, original: Any, args: argparse.Namespace) -> Any:
        from mcore_qwen3vl.training.step.optimizer import learning_rate_overrides

        config, overrides = original(args)
        return config, {**(overrides or {}), **learning_rate_overrides(args)}

    def _optimizer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        from mcore_qwen3vl.training.step.multi_tensor import use_fused_adam
        from mcore_qwen3vl.training.step.optimizer import make_resumable

        optimizer = original(*args, **kwargs)
        use_fused_adam(optimizer)
        make_resumable(optimizer)
        return optimizer

    def _finalize_gradients(
        self, model: list[Any], num_tokens: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Megatron's, divided by our normaliser; now the gradients are whole and can be measured.

        Its own `num_tokens` must be an integer, which a sum of weights is not.
        """
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(model, None, *args, **kwargs)
        self.forward_step.normalise(model)
        iteration = self.args.curr_iteration + 1
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
        self._check_norm(given["grad_norm"], iteration)
        due = self.args.log_json and iteration % self.args.log_interval == 0
        if due and losses and is_last_rank():  # as Megatron's own log
            numbers = {name: float(loss) for name, loss in losses.items()}
            numbers |= {"grad norm": given["grad_norm"], "learning rate": rate}
            metrics.append_json(
                self.args.log_json, {"iteration": iteration, **numbers, **self.last_report}
            )
        return original(losses, totals, rate, iteration, *rest, **kw)

    def _check_norm(self, norm: float | None, iteration: int) -> None:
        """Before a checkpoint can be saved, and without another wait for the device.

        Megatron's own check waits twice for each bucket of gradients, inside the backward pass.
        In fp16 the loss scaler skips such steps.
        """
        if norm is not None and not math.isfinite(norm) and not self.args.fp16:
            raise FloatingPointError(
                f"The gradient norm of iteration {iteration} is {norm}. No checkpoint holds its "
                "step. Go on from the last one, with a lower --lr or other data; without "
                "--no-check-for-nan-in-loss-and-grad Megatron says in which rank it appeared."
            )

    def _report(self, model: list[Any], iteration: int) -> None:
        from megatron.core import parallel_state
        from megatron.training import get_tensorboard_writer, get_wandb_writer
        from megatron.training.utils import print_rank_last

        from mcore_qwen3vl.training.logs.grad_norms import part_grad_norms

        report = self.metrics.report(parallel_state.get_data_parallel_group())
        norms = part_grad_norms(model)
        report |= {f"grad norm {part}": float(norm) for part, norm in norms.items()}
        self.last_report = report
        metrics.write(report, iteration, get_tensorboard_writer(), get_wandb_writer())
        print_rank_last(metrics.line(report))
