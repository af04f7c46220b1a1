"""The rank's side of a trace: one pass of the model, compared at every probe point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from mcore_qwen3vl.converters.adapters.adapter import Adapter
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.live.sharded import (
    Part,
    Values,
    factor_parts,
    gradient,
    hf_parts,
    weight,
)
from mcore_qwen3vl.converters.storage.dtypes import cast
from mcore_qwen3vl.model.inputs import local_positions
from mcore_qwen3vl.model.lora.attach import whole_tensors, with_tied
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.model.vision import share_frames
from mcore_qwen3vl.runtime.parallel import initialize
from mcore_qwen3vl.verify.measurement import Measurement, Measurements, measure, merge
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.parity.on_rank import Engine
from mcore_qwen3vl.verify.trace.hooks import ColumnMap, Hook, hooks_of
from mcore_qwen3vl.verify.trace.probe_points import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    WEIGHTS,
    input_of,
)
from mcore_qwen3vl.verify.trace.recording import Recording

Choose = Callable[[Measurements], tuple[str, str] | None]
"""Returns, from all ranks' measurements, part and name of the first one out of tolerance."""


@dataclass(frozen=True)
class TraceRequest:
    """The task of every rank.

    Attributes:
        hf: directory of weights that the model should have.
        config: directory whose config the model is built from.
        mcore: Megatron-Core checkpoint that it loads; None: it loads `hf`.
        recording: Hugging Face's values, in float64.
    """

    hf: Path
    config: Path
    mcore: Path | None
    case: Case
    recording: Recording
    choose: Choose
    adapter: Adapter | None = None


@dataclass
class RankTrace:
    """The results that one rank sends back.

    Attributes:
        measured: comparisons, by part and name.
        pieces: rows, columns and values at the first probe point out of tolerance.
        weights: the model's weights around that point, by HF name: box in the tensor and values.
    """

    measured: Measurements = field(default_factory=dict)
    pieces: list[tuple[Tensor, slice, Tensor]] = field(default_factory=list)
    weights: dict[str, list[tuple[Any, Tensor]]] = field(default_factory=dict)


def trace_on_rank(request: TraceRequest) -> RankTrace:
    """Run the model on this rank; every rank of the layout calls this."""
    initialize(request.case.layout)
    engine = Engine(
        request.config, request.case, uneven=False, mcore=request.mcore, adapter=request.adapter
    )
    hooks = _ComparisonHooks(engine.chunks, request)
    ends = engine.measure(request.recording.expected)
    measured = merge([hooks.measure(), ends, _weights(engine.chunks, request)])
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, measured)
    first = request.choose(merge(ranks))
    found = RankTrace(measured)
    if first is not None:
        part, name = first
        found.pieces = list(hooks.pieces(name, gradients=part == ACTIVATION_GRADIENTS))
        found.weights = _held(engine.chunks, name, gradient if part == GRADIENTS else weight)
    return found


def _weights(chunks: list[Qwen3VLModel], request: TraceRequest) -> Measurements:
    """Compare the loaded weights with those of the Hugging Face checkpoint and the adapter."""
    checkpoint = HuggingFaceCheckpoint(request.hf)
    own: dict[str, Tensor] = {}
    if request.adapter is not None:
        own = with_tied(chunks[0].architecture, whole_tensors(request.adapter))
        own |= request.adapter.tensors()

    def compared(part: Part) -> Measurement:
        if part.name in own:
            stored = own[part.name][part.box]
        else:
            stored = checkpoint.read(part.name, part.box)
        right = cast(stored, part.local.dtype, part.name)
        return measure(part.local.cpu(), right, bitwise=True, main=part.main)

    parts = chain(hf_parts(chunks), factor_parts(chunks))
    return merge({(WEIGHTS, part.label): compared(part)} for part in parts)


def _held(
    chunks: list[Qwen3VLModel], point: str, values: Values
) -> dict[str, list[tuple[Any, Tensor]]]:
    """Return this rank's parts of the weights at a probe point and, in a decoder layer, beside it.

    `point` may also be the label of a parameter; the label of one expert gives the fused tensor.
    """
    name = point.removesuffix(":input").partition("[")[0]
    beside = name.rpartition(".")[0] if ".layers." in name else name
    held: dict[str, list[tuple[Any, Tensor]]] = {}
    for part in chain(hf_parts(chunks, values), factor_parts(chunks, values)):
        if part.main and (part.name == name or part.name.startswith((f"{beside}.", f"{name}."))):
            held.setdefault(part.name, []).append((part.box, part.local.detach().cpu().clone()))
    return held


class _ComparisonHooks:
    """Forward hooks on every tensor to compare, which keep the first micro-batch only."""

    def __init__(self, chunks: list[Qwen3VLModel], request: TraceRequest) -> None:
        self.recording = request.recording
        points = request.recording.points
        self.hooks = [(chunk, hook) for chunk in chunks for hook in hooks_of(chunk, points)]
        self.values: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.tokens = request.recording.expected.batch.tokens
        for number, (_, hook) in enumerate(self.hooks):
            hook.module.register_forward_hook(self._keeper(number, hook), with_kwargs=True)

    def measure(self) -> Measurements:
        """Compare every hooked tensor with the recording."""
        of = self.recording
        measured: list[Measurements] = []
        for kind, local, expected in (
            (ACTIVATIONS, self.values, of.values),
            (ACTIVATION_GRADIENTS, self.gradients, of.gradients),
        ):
            for name, main, rows, columns, value in self._compared(local):
                if name in expected:
                    known = expected[name].flatten(0, -2)[rows][:, columns.reference]
                    measured.append({(kind, name): measure(value, known, main=main)})
        return merge(measured)

    def pieces(self, point: str, *, gradients: bool) -> Iterator[tuple[Tensor, slice, Tensor]]:
        """Yield the rows, columns and values of `point` that this rank answers for."""
        local = self.gradients if gradients else self.values
        for name, main, rows, columns, value in self._compared(local):
            if name == point and main:
                yield rows, columns.reference, value

    def _compared(
        self, local: dict[int, Tensor]
    ) -> Iterator[tuple[str, bool, Tensor, ColumnMap, Tensor]]:
        for number, value in local.items():
            chunk, hook = self.hooks[number]
            rows, mine, shared = self._rows(chunk, hook, len(value))
            value = value[mine]
            for columns in hook.columns:
                # If all ranks of a TP group have the same part, only the first answers.
                main = shared or columns.split or mpu.get_tensor_model_parallel_rank() == 0
                main = main and mpu.get_data_parallel_rank() == 0
                main = main and (chunk.pre_process or not columns.point.endswith("rotary_emb"))
                yield columns.point, main, rows, columns, value[:, columns.local]

    def _rows(self, chunk: Qwen3VLModel, hook: Hook, count: int) -> tuple[Tensor, Tensor, bool]:
        """Return rows of the recording, the matching local rows, and whether TP divides them."""
        if hook.rows != "tokens":
            return self._visual_rows(chunk, hook.rows == "features", count)
        micro = self.recording.micro
        batch, length = micro.input_ids.shape
        for sequence_parallel in (True, False):
            positions = local_positions(
                length,
                cp_size=mpu.get_context_parallel_world_size(),
                cp_rank=mpu.get_context_parallel_rank(),
                tp_size=mpu.get_tensor_model_parallel_world_size(),
                tp_rank=mpu.get_tensor_model_parallel_rank(),
                sequence_parallel=sequence_parallel and chunk.config.sequence_parallel,
                cu_seqlens=micro.cu_seqlens,
            )
            if len(positions) * batch == count:
                break
        else:
            point = hook.columns[0].point
            raise AssertionError(f"{count} rows of {point} are not the rank's tokens")
        # Flat indices b * S + s, (s * B,), of sequence-major rows.
        rows = (positions[:, None] + torch.arange(batch) * length).flatten()
        valid = self.recording.expected.valid[0].flatten()
        mine = torch.nonzero(valid[rows]).squeeze(1)
        shared = sequence_parallel and chunk.config.sequence_parallel
        return rows[mine], mine, bool(shared)

    def _visual_rows(
        self, chunk: Qwen3VLModel, features: bool, count: int
    ) -> tuple[Tensor, Tensor, bool]:
        tower, visual = chunk.visual, self.recording.micro.visual
        group = tower.sharing_group
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        empty = torch.empty(0, dtype=torch.int64)
        frames = visual.frame_patches if visual is not None else empty
        unit = tower.spatial_merge_unit
        share = share_frames(frames, unit, ranks, rank)
        rows = share.patch_rows[::unit] // unit if features else share.patch_rows
        # A rank without a frame of its own encodes a dummy, which has no counterpart.
        return rows, torch.arange(count if len(rows) else 0), group is not None

    def _keeper(self, number: int, hook: Hook) -> Callable[..., None]:
        def keep(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            if number in self.values:
                return
            tensor = hook.pick(input_of(args, kwargs) if hook.side == "input" else output)
            # A copy, because pipeline stages free what they have sent.
            self.values[number] = hook.flat(tensor.detach()).cpu().clone()
            if tensor.requires_grad and not hook.shared:

                def keep_gradient(gradient: Tensor) -> None:
                    scale = self._gradient_scale(number) / self.tokens
                    self.gradients[number] = hook.flat(gradient.detach()).cpu() * scale

                tensor.register_hook(keep_gradient)

        return keep

    def _gradient_scale(self, number: int) -> float:
        """Return the factor that corrects a gradient inside the vision tower.

        If TP shares the tower's work without SP, gradients there are TP times too large. Megatron
        averages the parameters' gradients over TP afterwards.
        """
        chunk, hook = self.hooks[number]
        tp = mpu.get_tensor_model_parallel_world_size()
        shared = hook.rows != "tokens" and chunk.visual.sharing_group is not None
        return 1 / tp if shared and not chunk.config.sequence_parallel else 1.0
