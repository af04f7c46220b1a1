"""What a run says of its steps and validations, and to whom.

A step's numbers go to the terminal, ``--log-json``, the trackers, and the writers that Megatron's
flags have opened.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_tensorboard_writer, get_wandb_writer
from megatron.training.utils import is_last_rank, print_rank_last

from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.forward_step import ForwardStep
from mcore_qwen3vl.training.hooks import LossScaleSkips, NormCheck
from mcore_qwen3vl.training.logs.metrics import (
    LeftOut,
    Metrics,
    append_json,
    known_losses,
    log_line,
    write_report,
)
from mcore_qwen3vl.training.logs.terminal import RunProgress
from mcore_qwen3vl.training.logs.trackers import Trackers
from mcore_qwen3vl.training.optimizer import part_grad_norms


class StepReport:
    """Collects, checks and shows the numbers of steps and validations; every rank has one."""

    def __init__(
        self,
        settings: Settings,
        args: argparse.Namespace,
        forward_step: ForwardStep,
        *,
        metrics: Metrics,
        norms: NormCheck,
        progress: RunProgress,
        trackers: Trackers,
        rehearsed: bool,
    ) -> None:
        """
        Args:
            args: Megatron's, which its loop changes while it runs.
            rehearsed: no step is logged for being the last.
        """
        self._settings, self._args, self._forward_step = settings, args, forward_step
        self._metrics, self._norms = metrics, norms
        self._progress, self._trackers = progress, trackers
        self._rehearsed = rehearsed
        self.skips = LossScaleSkips(settings.compute)
        self.left_out = LeftOut()
        self._measured: dict[str, float] = {}  # what `measure` found last
        self._steps = 0  # of this run so far, with those of --iterations-to-skip
        self._validated_at = -1  # the step of the last validation

    def is_logged(self, step: int) -> bool:
        """Return whether the numbers of a step are written."""
        return step % self._settings.logs.log_interval == 0 or self._is_last_step(step)

    def _is_last_step(self, step: int) -> bool:
        """Return whether this run trains no further step, as far as that is known before."""
        if self._rehearsed:  # its numbers stand for all other steps, which are seldom logged
            return False
        last, interval = self._args.train_iters, self._settings.loop.exit_interval
        while self._settings.loop.leaves_out(last):
            last -= 1
        return step == last or bool(interval and step % interval == 0)

    def measure(self, model: list[Any], iteration: int) -> None:
        """Compute the log's numbers that Megatron does not know; all ranks call this."""
        report = self._metrics.report(parallel_state.get_data_parallel_group())
        report |= {f"grad norm {part}": float(n) for part, n in part_grad_norms(model).items()}
        report |= self._forward_step.data_sets.report()
        self._measured = report
        write_report(report, iteration, get_tensorboard_writer(), get_wandb_writer())
        print_rank_last(log_line(report))

    def log_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the step's gradient norm, and write the log's numbers if they are due."""
        bound = inspect.signature(original).bind(*args, **kwargs)
        arguments = bound.arguments
        iteration = arguments["iteration"]
        self._steps += 1
        if is_last_rank():  # Megatron's own log is the last rank's too
            self._progress.step(iteration, self._args.train_iters)
        if self._settings.loop.leaves_out(iteration):
            self._progress.say(f"step {iteration}: left out (--iterations-to-skip)")
            return original(*args, **kwargs)
        self._check_step(arguments)
        if is_last_rank():
            self._show_step(arguments)
        if get_tensorboard_writer():
            arguments["loss_dict"] = known_losses(
                arguments["loss_dict"], arguments["total_loss_dict"]
            )
        return original(*bound.args, **bound.kwargs)

    def _check_step(self, arguments: Mapping[str, Any]) -> None:
        """Count the step if fp16 skipped it, and check its gradient norm; all ranks call this."""
        self.skips.add(arguments["skipped_iter"])
        if self._settings.compute.fp16:  # the loss scaler skips steps with a norm that is none
            return
        self._norms.add(arguments["grad_norm"], arguments["iteration"])
        if self.is_logged(arguments["iteration"]):  # otherwise it is checked a step late
            self._norms.settle()

    def _show_step(self, arguments: Mapping[str, Any]) -> None:
        """Show the numbers of the first step and of those that are logged, and log these."""
        iteration, norm = arguments["iteration"], arguments["grad_norm"]
        due = self.is_logged(iteration)
        if not (due or arguments.get("is_first_iteration")):
            return
        losses = {name: float(loss) for name, loss in arguments["loss_dict"].items()}
        numbers: dict[str, Any] = {
            # A step has no loss if none of its records can be used.
            **{name: None if math.isnan(loss) else loss for name, loss in losses.items()},
            "grad norm": None if norm is None else float(norm),
            "learning rate": arguments["learning_rate"],
        }
        if due:
            numbers |= self.skips.report() if self._settings.compute.fp16 else {}
            numbers |= self._measured
        self._progress.show(iteration, numbers)
        if due:
            self._keep(iteration, numbers)

    def _keep(self, iteration: int, numbers: Mapping[str, float | None]) -> None:
        """Write numbers to ``--log-json``, and send them to trackers."""
        if log_json := self._settings.training.log_json:
            append_json(log_json, {"iteration": iteration, **numbers})
        self._trackers.log(numbers, iteration)

    def validation(
        self, losses: dict[str, Any] | None, record: Callable[[int, dict[str, Any]], None]
    ) -> None:
        """Complete and show the losses of a validation; all ranks call this.

        Args:
            losses: scalar tensors by name, as Megatron's ``evaluate`` returns them. Those of the
                data sets are added; then those that are no number are removed. None: the run's
                time was up meanwhile.
            record: called with the step and all losses, also those that are no number.
        """
        iteration = self._args.iteration + self._steps
        # Megatron validates once more at the end, even right after the last interval.
        is_new, self._validated_at = iteration != self._validated_at, iteration
        if losses is None:
            losses = {}
        else:
            # Megatron writes these to its logs as its own.
            parts = self._forward_step.validation_sets.report()
            losses |= {name: torch.tensor(value) for name, value in parts.items()}
            record(iteration, losses)
        left_out = self.left_out.report(parallel_state.get_data_parallel_group())
        if losses and is_new and is_last_rank():
            numbers = {f"validation {name}": float(loss) for name, loss in losses.items()}
            listing = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
            numbers |= {f"validation {name}": n for name, n in left_out.items()}
            listing += "".join(f"  without {n} {name}" for name, n in left_out.items())
            self._progress.say(f"step {iteration}: {listing}")
            self._keep(iteration, numbers)
        for name in [name for name, loss in losses.items() if math.isnan(float(loss))]:
            del losses[name]  # Megatron would write it to TensorBoard
