"""The forward step that Megatron calls, and what it reduces.

A forward step takes a batch, runs the model, and hands losses to the objective of a loss
(:mod:`mcore_qwen3vl.losses`). Sums of samples and of data sets are kept for the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.decoder.attention import PackedSequence
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.training.gradient_shards import scale_gradients

label_module(__file__, "logits and loss")

Names = tuple[str, ...]
"""Of the samples of a micro-batch: file and line."""

_SHOWN = 8
_KEPT_STEPS = 2  # the gradient norm is checked a step late

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
RunBatch = Callable[..., tuple[Tensor, Tensor]]
"""A function with the arguments and results of :func:`forward`."""


def forward(
    batch: Batch,
    model: torch.nn.Module,
    *,
    plan: bool = False,
    processor: Callable[..., Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Run one micro-batch through one pipeline chunk, wrapped or not.

    Args:
        plan: only build the plan of :meth:`.Qwen3VLModel.build_schedule_plan`, and return it in
            place of the output.
        processor: computes what the last stage returns: Megatron's ``output_processor``, with the
            batch and the chunk before its own arguments.
        options: passed to :class:`~mcore_qwen3vl.model.qwen3vl.Qwen3VLModel`.

    Returns:
        The chunk's output, which for the last chunk is (B, s) cross entropies unless `options` say
        otherwise; and the (s,) int64 positions of this rank.
    """
    chunk = get_attr_wrapped_model(model, "local_tokens", return_model_obj=True)
    has_lm_head = chunk.post_process and chunk.head_labels is None
    packing = _packed_sequence(batch)
    if processor is not None:
        options["output_processor"] = partial(processor, batch, chunk)
    output = (chunk.build_schedule_plan if plan else model)(
        batch.input_ids,
        batch.position_ids,
        padding_mask=batch.padding_mask,
        # -100 becomes 0, a column that exists: the loss weights alone decide what counts.
        labels=batch.labels.clamp(min=0) if has_lm_head else None,
        visual=batch.visual,
        packed_seq_params=packing,
        **options,
    )
    return output, chunk.local_tokens(batch.input_ids.shape[1], packing)


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
        # A step that failed while it ran is not among those that are done.
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
            The chunk's output, or with `return_schedule_plan` the plan that computes it; and the
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


def _packed_sequence(batch: Batch) -> PackedSequence | None:
    """Return the sub-sequences' bounds, on the device for kernels and on the host for shapes."""
    if batch.cu_seqlens is None:
        return None
    bounds = to_device(batch.cu_seqlens, batch.input_ids.device)
    return PackedSequence(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        bounds=tuple(batch.cu_seqlens.tolist()),
    )


class Reduced(NamedTuple):
    """The loss and the log's numbers for a micro-batch on this rank.

    Attributes:
        total: the sum to minimise, a scalar with a gradient.
        normaliser: divides `total` and `sums`, after each is summed over the global batch.
        sums: numbers for the log, by name: scalars without a gradient, or (2,) with a number and
            a normaliser of its own. The first is the loss.
        data_sets: for data of several data sets, the sum of each one's losses and its normaliser,
            by name: scalars without a gradient.
    """

    total: Tensor
    normaliser: Tensor
    sums: dict[str, Tensor]
    data_sets: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({})


def reduce_units(total: Tensor, batch: Batch, numbers: Mapping[str, Tensor]) -> Reduced:
    """Return the loss of units, such as queries, that all ranks of a CP group have whole.

    Every CP rank has all units, but the gradients of its own tokens alone. So each rank counts 1/CP
    of the units and of the numbers.

    Args:
        total: the sum of the units' losses, with a gradient.
        batch: the micro-batch, whose units are its records or all their sequences.
        numbers: values of the units for the log, by name; their gradients are not used. The first
            are the losses.
    """
    share = 1 / parallel_state.get_context_parallel_world_size()
    losses = next(iter(numbers.values())).detach()
    return Reduced(
        total,
        torch.full([], len(losses) * share, dtype=torch.float64, device=total.device),
        {name: values.detach().sum() * share for name, values in numbers.items()},
        {
            name: (
                losses.where(members, 0.0).sum() * share,
                members.sum(dtype=torch.float64) * share,
            )
            for name, members in _units_of_data_sets(batch, losses)
        },
    )


def _units_of_data_sets(batch: Batch, losses: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each data set's name and which units are its own, a mask like `losses` (units,)."""
    names = batch.data_sets
    if len(names) > len(losses):  # several sequences make a unit
        names = tuple(
            names[end - size]  # of its first sequence
            for end, size in zip(accumulate(batch.groups), batch.groups, strict=True)
        )
    for name in dict.fromkeys(names):
        yield name, to_device(torch.tensor([data_set == name for data_set in names]), losses.device)


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


Objective = Callable[[Batch, Tensor, Tensor], Reduced]
"""``(batch, local, losses) -> Reduced``.

Args:
    batch: the micro-batch.
    local: (s,) int64 on the host: this rank's positions in the sequence.
    losses: (B, s) float32 cross entropies there.
"""
