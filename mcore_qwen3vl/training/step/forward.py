"""The forward step: run a batch through the model and compute its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.model.decoder.attention import PackedSequence
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.training.step.losses import DataSetLosses, Objective, Reduced

Names = tuple[str, ...]
"""Of the samples of a micro-batch: file and line."""

_SHOWN = 8
_KEPT_STEPS = 2  # the gradient norm is checked a step late

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
RunBatch = Callable[..., tuple[Tensor, Tensor]]
"""A function with the arguments and results of :func:`forward`."""


def forward(
    batch: Batch, model: torch.nn.Module, *, plan: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """Run one micro-batch through one pipeline chunk, wrapped or not.

    Args:
        plan: only build the plan of :meth:`Qwen3VLModel.build_schedule_plan`, and return it in
            place of the output.
        options: passed to :class:`~mcore_qwen3vl.model.qwen3vl.Qwen3VLModel`.

    Returns:
        The chunk's output, which for the last chunk is (B, s) cross entropies unless `options` say
        otherwise; and the (s,) int64 positions of this rank.
    """
    chunk = get_attr_wrapped_model(model, "local_tokens", return_model_obj=True)
    has_logits = chunk.post_process and chunk.head_labels is None
    packing = _packing(batch)
    output = (chunk.build_schedule_plan if plan else model)(
        batch.input_ids,
        batch.position_ids,
        padding_mask=batch.padding_mask,
        labels=batch.labels.clamp(min=0) if has_logits else None,
        visual=batch.visual,
        packed_seq_params=packing,
        **options,
    )
    return output, chunk.local_tokens(batch.input_ids.shape[1], packing)


def processor_runner(processor: Callable[..., Tensor]) -> RunBatch:
    """Return what runs a micro-batch, of which the last stage returns what `processor` computes.

    It is Megatron's ``output_processor``, with the batch and the chunk before its own arguments.
    """

    def run(batch: Batch, model: torch.nn.Module, *, plan: bool = False) -> tuple[Tensor, Tensor]:
        chunk = get_attr_wrapped_model(model, "local_tokens", return_model_obj=True)
        return forward(batch, model, plan=plan, output_processor=partial(processor, batch, chunk))

    return run


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
        batches = self._done.get(step, self._running)
        bad = [n for n, loss in batches.items() if loss is not None and not loss.isfinite().item()]
        what = "loss is" if bad else "gradients are"
        return FloatingPointError(
            f"In step {step} the {what} NaN or infinite, on {_listing(bad or list(batches))}. No "
            "checkpoint holds that step. To go on without its records, run the same command with "
            f"--iterations-to-skip {step}. Where loss or gradient norm had grown before, lower "
            "--lr: begin anew, or from a checkpoint with --load DIR --finetune and another --save"
        )


def _listing(batches: list[Names]) -> str:
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
        """Return the loss's sum for Megatron's schedule, a zero token count, and sums for the log.

        The schedule would add normalisers up as int32, so :meth:`normalise` divides instead.
        """
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
            chunk.scale_gradients(scale)


def _packing(batch: Batch) -> PackedSequence | None:
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
