"""The rank's side of a trace: one pass of the model, compared at every probe point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from mcore_qwen3vl.converters.adapters.adapter import Adapter
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.live.sharded import Part, factor_parts, hf_parts
from mcore_qwen3vl.converters.storage.dtypes import cast
from mcore_qwen3vl.model.lora.attach import whole_tensors, with_tied
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.model.sequence import local_positions
from mcore_qwen3vl.model.vision import share_frames
from mcore_qwen3vl.runtime.parallel import initialize
from mcore_qwen3vl.verify.measurement import Measurement, Measurements, measure, merge
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.parity.on_rank import Engine
from mcore_qwen3vl.verify.trace.hooks import ColumnMap, Hook, hooks_of
from mcore_qwen3vl.verify.trace.probe_points import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    WEIGHTS,
    input_of,
)
from mcore_qwen3vl.verify.trace.recording import Recording


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
    adapter: Adapter | None = None


def trace_on_rank(request: TraceRequest) -> Measurements:
    """Run the model on this rank, and compare what it computes; every rank calls this."""
    initialize(request.case.layout)
    engine = Engine(
        request.config, request.case, uneven=False, mcore=request.mcore, adapter=request.adapter
    )
    hooks = _ComparisonHooks(engine.chunks, request)
    ends = engine.measure(request.recording.expected)
    return merge([hooks.measure(), ends, _weights(engine.chunks, request)])


def _weights(chunks: list[Qwen3VLModel], request: TraceRequest) -> Measurements:
    """Compare the loaded weights with those of the Hugging Face checkpoint and the adapter."""
    checkpoint = HuggingFaceCheckpoint(request.hf)
    of_adapter: dict[str, Tensor] = {}
    if request.adapter is not None:
        of_adapter = with_tied(chunks[0].architecture, whole_tensors(request.adapter))
        of_adapter |= request.adapter.tensors()

    def compare(part: Part) -> Measurement:
        if part.name in of_adapter:
            stored = of_adapter[part.name][part.box]
        else:
            stored = checkpoint.read(part.name, part.box)
        right = cast(stored, part.local.dtype, part.name)
        return measure(part.local.cpu(), right, bitwise=True, main=part.main)

    parts = chain(hf_parts(chunks), factor_parts(chunks))
    return merge({(WEIGHTS, part.label): compare(part)} for part in parts)


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
        measured: list[Measurements] = []
        for kind, local, expected in (
            (ACTIVATIONS, self.values, self.recording.values),
            (ACTIVATION_GRADIENTS, self.gradients, self.recording.gradients),
        ):
            for name, main, rows, columns, value in self._local_values(local):
                if name in expected:
                    known = expected[name].flatten(0, -2)[rows][:, columns.reference]
                    measured.append({(kind, name): measure(value, known, main=main)})
        return merge(measured)

    def _local_values(
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
