"""The forward step that Megatron calls, and what it reduces.

A forward step takes a batch, runs the model, and hands losses to the objective of a loss
(:mod:`mcore_qwen3vl.losses`). Sums of samples and of data sets are kept for the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.forward import RunBatch, forward
from mcore_qwen3vl.losses.reduction import Objective, Reduced
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.training.gradient_shards import scale_gradients

label_module(__file__, "logits and loss")

Names = tuple[str, ...]
"""Of the samples of a micro-batch: file and line."""

_SHOWN = 8
_KEPT_STEPS = 2  # the gradient norm is checked a step late

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


class StepRecords:
    """The micro-batches of this rank's last steps, and their losses where they are known."""

    def __init__(self) -> None:
        self._running: dict[Names, Tensor | None] = {}
        self._done: dict[int, dict[Names, Tensor | None]] = {}

    def add(self, names: Names, loss: Tensor | None = None) -> None:
        """Note a micro-batch of the step that runs, by the names of its samples.

        Its loss is a scalar that stays on the device; None before it is known, and on the ranks
        that compute none.
        """
        self._running[names] = loss

    def finish(self, step: int) -> None:
        """Count what was added to `step`, as the log counts."""
        self._done[step], self._running = self._running, {}
        self._done = dict(list(self._done.items())[-_KEPT_STEPS:])

    def explain(self, step: int) -> FloatingPointError:
        """Make the error that names the records of `step`; waits for the device."""
        # A step that failed while it ran is not among the finished ones.
        batches = self._done.get(step, self._running)
        bad = [n for n, loss in batches.items() if loss is not None and not loss.isfinite().item()]
        what = "loss is" if bad else "gradients are"
        return FloatingPointError(
            f"In step {step} the {what} NaN or infinite, on "
            f"{_names_in_words(bad or list(batches))}. No checkpoint holds that step. To go on "
            "without its records, run the same command with "
            f"--iterations-to-skip {step}. Where loss or gradient norm had grown before, lower "
            "--lr: begin anew, or from a checkpoint with --load DIR --finetune and another --save"
        )


def _names_in_words(batches: list[Names]) -> str:
    names = list(dict.fromkeys(name for batch in batches for name in batch))
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest if names else "records that this rank does not know"


class ForwardStep:
    """Megatron's ``forward_step_func`` for one run.

    On the last stage, the objective gets what `run` returns for a micro-batch. The data sets of the
    training and the validation data have names if there are several.
    """

    def __init__(
        self,
        objective: Objective,
        run: RunBatch = forward,
        *,
        data_sets: Sequence[str] = (),
        validation_sets: Sequence[str] = (),
    ) -> None:
        self._objective, self._run = objective, run
        self._normaliser: Tensor | None = None
        self.records = StepRecords()
        self.data_sets = DataSetLosses(data_sets)
        self.validation_sets = DataSetLosses(validation_sets)

    def __call__(
        self, batches: Iterator[Batch], model: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[Tensor, LossFunction]:
        """Run one micro-batch through one pipeline chunk.

        Returns:
            The chunk's output, or with `return_schedule_plan` the plan to compute it; and the
            function that Megatron applies to the output on the last stage.
        """
        batch = next(batches)
        if torch.is_grad_enabled():
            self.records.add(batch.names)
        output, local = self._run(batch, model, plan=return_schedule_plan)
        return output, partial(self._reduce, batch, local)

    def _reduce(
        self, batch: Batch, local: Tensor, losses: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss's sum for Megatron's schedule, a token count of 0, and sums to log."""
        reduced = self._objective(batch, local, losses.float())
        if batch.is_spare:
            # Not a product with 0, which keeps what is no number.
            total = losses.float().where(torch.zeros_like(losses, dtype=torch.bool), 0.0).sum()
            nothing = {name: torch.zeros_like(value) for name, value in reduced.sums.items()}
            reduced = Reduced(total, torch.zeros_like(reduced.normaliser), nothing)
        normaliser = reduced.normaliser.detach().double()
        training = torch.is_grad_enabled()
        sums = self.data_sets if training else self.validation_sets
        sums.add(next(iter(reduced.sums)), reduced.data_sets)
        if training:
            done = self._normaliser
            self._normaliser = normaliser if done is None else done + normaliser
            self.records.add(batch.names, reduced.total.detach())
        reports = {
            name: value if value.ndim else torch.stack([value, normaliser.to(value.dtype)])
            for name, value in reduced.sums.items()
        }
        # The schedule would add normalisers up as int32, so :meth:`normalise` divides instead.
        return reduced.total, torch.zeros_like(normaliser, dtype=torch.int), reports

    def normalise(self, model: list[Any]) -> None:
        """Divide the summed gradients by the global batch's normaliser; all ranks call this."""
        normaliser, self._normaliser = self._normaliser, None
        if normaliser is None:  # not the last pipeline stage
            normaliser = torch.zeros([], dtype=torch.float64, device=torch.cuda.current_device())
        dist.broadcast(
            normaliser,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        dist.all_reduce(
            normaliser, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        # If no token is trained, the gradients are zero and must stay zero.
        scale = torch.where(normaliser > 0, 1 / normaliser, 0.0).float()
        for chunk in model:
            scale_gradients(chunk, scale)


class DataSetLosses:
    """Sums of data sets' losses that stay on the device until the log is written.

    All ranks make it with the same names of data sets in the same order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._loss = ""
        self._sums: dict[str, Tensor] = {}

    def add(self, loss: str, parts: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add sum and normaliser of each data set of a micro-batch, without a host sync."""
        self._loss = loss
        for name, part in parts.items():
            pair = torch.stack([value.detach().double() for value in part])
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def report(self) -> dict[str, float]:
        """Return the mean loss of each data set since the last report, over all ranks.

        All ranks call this. Those before the last pipeline stage, which have no loss, get nothing.
        A data set without a trained token since then is left out.
        """
        if not self._names or not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
        sums = torch.stack([self._sums.get(name, nothing) for name in self._names])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=group)
        self._sums = {}
        return {
            f"{self._loss} {name}": total / normaliser
            for name, (total, normaliser) in zip(self._names, sums.tolist(), strict=True)
            if normaliser
        }
