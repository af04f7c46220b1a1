"""Our side of a trace, on one rank: a pass of the sharded model, compared at every probe point.

Modules are paired by the table that maps the weights. The rows of a weight that this rank holds are
the columns of its output, and a row-parallel weight's columns are those of its input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from mcore_qwen3vl.converters.adapters.adapter import Adapter
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.live import Overlap, factor_parts, hf_parts
from mcore_qwen3vl.converters.storage.dtypes import cast
from mcore_qwen3vl.model.inputs import local_positions
from mcore_qwen3vl.model.lora import whole_tensors, with_tied_embedding
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.model.vision import share_frames
from mcore_qwen3vl.runtime.launch import initialize
from mcore_qwen3vl.verification.measurement import Measurement, Measurements, measure, merge
from mcore_qwen3vl.verification.parity.case import ParityCase
from mcore_qwen3vl.verification.parity.on_rank import Engine
from mcore_qwen3vl.verification.trace.recording import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    ATTENTION,
    DELTA_NET,
    TEXT,
    VISUAL,
    WEIGHTS,
    ProbePoint,
    Recording,
    Rows,
    cosine_and_sine,
    experts_point,
    input_of,
)


@dataclass(frozen=True)
class TraceRequest:
    """The task of every rank."""

    hf: Path  # directory of weights that the model should have
    config: Path  # directory whose config the model is built from
    mcore: Path | None  # Megatron-Core checkpoint that it loads; None: it loads `hf`
    case: ParityCase
    recording: Recording  # Hugging Face's values, in float64
    adapter: Adapter | None


def trace_on_rank(request: TraceRequest) -> Measurements:
    """Run the model on this rank, and compare what it computes; every rank calls this."""
    initialize(request.case.layout)
    engine = Engine(
        request.config, request.case, uneven=False, mcore=request.mcore, adapter=request.adapter
    )
    kept = _KeptTensors(engine.chunks, request)
    ends = engine.measure(request.recording.expected)
    return merge([kept.measure(), ends, _compare_weights(engine.chunks, request)])


def _compare_weights(chunks: list[Qwen3VLModel], request: TraceRequest) -> Measurements:
    """Compare the loaded weights with those of the Hugging Face checkpoint and the adapter."""
    checkpoint = HuggingFaceCheckpoint(request.hf)
    of_adapter: dict[str, Tensor] = {}
    if request.adapter is not None:
        of_adapter = with_tied_embedding(chunks[0].architecture, whole_tensors(request.adapter))
        of_adapter |= request.adapter.factor_tensors()

    def compare(part: Overlap) -> Measurement:
        if part.name in of_adapter:
            stored = of_adapter[part.name][part.box]
        else:
            stored = checkpoint.read_tensor(part.name, part.box)
        right = cast(stored, part.local.dtype, part.name)
        return measure(part.local.cpu(), right, bitwise=True, main=part.main)

    parts = chain(hf_parts(chunks), factor_parts(chunks))
    return merge({(WEIGHTS, part.label): compare(part)} for part in parts)


class _KeptTensors:
    """Every tensor to compare, of the first micro-batch, kept by forward hooks."""

    def __init__(self, chunks: list[Qwen3VLModel], request: TraceRequest) -> None:
        self.recording = request.recording
        points = request.recording.points
        self.traced = [
            (chunk, traced) for chunk in chunks for traced in traced_tensors(chunk, points)
        ]
        self.values: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.tokens = request.recording.expected.batch.tokens
        for number, (_, traced) in enumerate(self.traced):
            traced.module.register_forward_hook(
                self._make_keeping_hook(number, traced), with_kwargs=True
            )

    def measure(self) -> Measurements:
        """Compare every kept tensor with the recording."""
        measured: list[Measurements] = []
        for kind, local, expected in (
            (ACTIVATIONS, self.values, self.recording.values),
            (ACTIVATION_GRADIENTS, self.gradients, self.recording.gradients),
        ):
            for number, value in local.items():
                chunk, traced = self.traced[number]
                rows, mine, shared = self._matching_rows(chunk, traced, len(value))
                for columns in (c for c in traced.columns if c.point in expected):
                    name = columns.point
                    # If all ranks of a TP group have the same part, only the first answers.
                    main = shared or columns.split or mpu.get_tensor_model_parallel_rank() == 0
                    main = main and mpu.get_data_parallel_rank() == 0  # all have the same input
                    # Every stage computes the rotary tables, and the first answers for them.
                    main = main and (chunk.pre_process or not name.endswith("rotary_emb"))
                    expected_values = expected[name].flatten(0, -2)[rows][:, columns.reference]
                    actual = value[mine][:, columns.local]
                    measured.append({(kind, name): measure(actual, expected_values, main=main)})
        return merge(measured)

    def _matching_rows(
        self, chunk: Qwen3VLModel, traced: TracedTensor, count: int
    ) -> tuple[Tensor, Tensor, bool]:
        """Return rows of the recording, the matching local rows, and whether TP divides them."""
        if traced.rows != "tokens":
            return self._matching_visual_rows(chunk, traced.rows == "features", count)
        micro = self.recording.micro
        batch, length = micro.input_ids.shape
        # Even under sequence parallelism some modules see all tokens, which were gathered before.
        for shared in (bool(chunk.config.sequence_parallel), False):
            positions = local_positions(
                length,
                cp_size=mpu.get_context_parallel_world_size(),
                cp_rank=mpu.get_context_parallel_rank(),
                tp_size=mpu.get_tensor_model_parallel_world_size(),
                tp_rank=mpu.get_tensor_model_parallel_rank(),
                sequence_parallel=shared,
                cu_seqlens=micro.cu_seqlens,
            )
            if len(positions) * batch == count:
                break
        else:
            point = traced.columns[0].point
            raise AssertionError(f"{count} rows of {point} are not the rank's tokens")
        # Flat indices b * S + s, (s * B,), of sequence-major rows.
        rows = (positions[:, None] + torch.arange(batch) * length).flatten()
        valid = self.recording.expected.valid[0].flatten()
        mine = torch.nonzero(valid[rows]).squeeze(1)
        return rows[mine], mine, shared

    def _matching_visual_rows(
        self, chunk: Qwen3VLModel, features: bool, count: int
    ) -> tuple[Tensor, Tensor, bool]:
        tower, visual = chunk.visual, self.recording.micro.visual
        group = tower.sharing_group
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        frames = torch.empty(0, dtype=torch.int64) if visual is None else visual.frame_patches
        unit = tower.spatial_merge_unit
        share = share_frames(frames, unit, ranks, rank)
        rows = share.patch_rows[::unit] // unit if features else share.patch_rows
        # A rank without a frame of its own encodes a dummy, which has no counterpart.
        return rows, torch.arange(count if len(rows) else 0), group is not None

    def _make_keeping_hook(self, number: int, traced: TracedTensor) -> Callable[..., None]:
        """Return a forward hook that keeps the values of a traced tensor, and their gradient."""

        def keep_first(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            if number in self.values:  # from the first micro-batch
                return
            tensor = traced.pick(input_of(args, kwargs) if traced.side == "input" else output)
            # A copy, because pipeline stages free what they have sent.
            self.values[number] = traced.flatten_rows(tensor.detach()).cpu().clone()
            if tensor.requires_grad and not traced.shared:

                def keep_gradient(gradient: Tensor) -> None:
                    scale = self._gradient_scale(number) / self.tokens
                    self.gradients[number] = traced.flatten_rows(gradient.detach()).cpu() * scale

                tensor.register_hook(keep_gradient)

        return keep_first

    def _gradient_scale(self, number: int) -> float:
        """Return the factor that corrects a gradient inside the vision tower."""
        chunk, traced = self.traced[number]
        shared = traced.rows != "tokens" and chunk.visual.sharing_group is not None
        # If TP shares the tower's work without SP, gradients there are TP times too large. Megatron
        # averages the parameters' gradients over TP afterwards.
        return 1 / _tp_size() if shared and not chunk.config.sequence_parallel else 1.0


@dataclass(frozen=True)
class ColumnMap:
    """The columns of a probe point that a local tensor holds."""

    point: str
    local: slice = slice(None)  # columns of the local tensor
    reference: slice = slice(None)  # the same at the probe point
    split: bool = False  # whether other ranks of the TP group hold other columns


@dataclass(frozen=True)
class TracedTensor:
    """A tensor that a module of this chunk takes or returns."""

    module: nn.Module
    rows: Rows  # what its rows stand for; tokens are sequence-major
    columns: tuple[ColumnMap, ...]  # the columns of probe points that it holds
    side: str = "output"
    # It returns the tensor from the input or output.
    pick: Callable[[Any], Tensor] = lambda value: value[0] if isinstance(value, tuple) else value
    spread: Callable[[Tensor], Tensor] = lambda tensor: tensor  # brings it into the compared form
    wide: int = 1  # number of trailing axes that make the columns
    shared: bool = False  # whether several ranks hold these columns, each with part of a gradient

    def flatten_rows(self, tensor: Tensor) -> Tensor:
        """Return the compared form of `tensor` as (rows, columns)."""
        return self.spread(tensor).flatten(-self.wide).flatten(0, -2)


def traced_tensors(chunk: Qwen3VLModel, points: list[ProbePoint]) -> Iterator[TracedTensor]:
    """Yield this chunk's tensors to compare at `points`; other points are on other pipeline stages.

    A norm that Transformer Engine fuses into the next linear layer has no output to compare.
    """
    if chunk.pre_process:
        yield from _traced_in_tower(chunk, points)
        yield _traced_tokens(chunk.embedding, f"{TEXT}.embed_tokens")
    yield TracedTensor(
        chunk.rotary_pos_emb,
        "tokens",
        (ColumnMap(f"{TEXT}.rotary_emb"),),
        spread=lambda angles: (
            cosine_and_sine((angles.cos(), angles.sin())) * chunk.rotary_pos_emb.attention_scaling
        ),
    )
    yield from _traced_linears_and_norms(chunk)
    for layer in chunk.decoder.layers:
        number = layer.layer_number - 1
        name = f"{TEXT}.layers.{number}"
        if number == 0:
            yield _traced_tokens(layer, f"{TEXT}.inputs_embeds", side="input")
        if not chunk.architecture.delta_net_layers[number]:
            yield from _traced_head_norms(chunk, layer.self_attention, f"{name}.self_attn")
        if chunk.architecture.moe_layers[number]:
            yield _traced_tokens(layer.mlp.router, f"{name}.mlp.gate")
            yield _traced_tokens(layer.mlp, experts_point(chunk.architecture, name))
        yield _traced_tokens(layer, name)
    if chunk.post_process:
        yield _traced_logits(chunk)


def _traced_tokens(module: nn.Module, point: str, side: str = "output") -> TracedTensor:
    return TracedTensor(module, "tokens", (ColumnMap(point),), side)


def _traced_in_tower(chunk: Qwen3VLModel, points: list[ProbePoint]) -> Iterator[TracedTensor]:
    """Yield the tensors of the vision tower, which keeps its Hugging Face names."""
    for point in points:
        if not point.name.startswith(VISUAL):
            continue
        module = chunk.visual.get_submodule(point.module.removeprefix(f"{VISUAL}."))
        wide = 2 if point.name.endswith("pos_embed") else 1
        traced = TracedTensor(module, point.rows, (ColumnMap(point.name),), wide=wide)
        # A norm may return a residual too, where Hugging Face's returns its output alone.
        yield traced if isinstance(module, nn.LayerNorm) else replace(traced, pick=point.pick)


def _traced_linears_and_norms(chunk: Qwen3VLModel) -> Iterator[TracedTensor]:
    """Yield the tensors of the decoder's linear layers and norms, found by their weights."""
    modules = dict(chunk.named_modules())
    outputs: dict[str, list[ColumnMap]] = defaultdict(list)
    used: dict[str, int] = defaultdict(int)  # columns of a module's output so far
    for part in hf_parts([chunk]):
        owner, point = (n.rpartition(".")[0] for n in (part.parameter, part.name))
        elsewhere: tuple[str, ...] = (".experts", "router", "q_layernorm", "k_layernorm")
        elsewhere += (".layer_norm_weight", "out_norm", "conv1d", "A_log", "dt_bias", "gate_weight")
        if not owner.startswith("decoder.") or any(name in part.parameter for name in elsewhere):
            continue
        rows, *columns = part.box
        assert isinstance(rows, slice)
        length = rows.stop - rows.start
        weight = modules[owner].weight
        split = getattr(weight, "partition_dim", -1) == 0 and _tp_size() > 1
        local = slice(used[owner], used[owner] + length)
        used[owner] += length
        outputs[owner].append(ColumnMap(point, local, rows, split))
        if point.endswith((ATTENTION[1], DELTA_NET[1])):
            assert isinstance(columns[0], slice)
            local = slice(0, columns[0].stop - columns[0].start)
            of_input = ColumnMap(f"{point}:input", local, columns[0], _tp_size() > 1)
            yield TracedTensor(modules[owner], "tokens", (of_input,), "input")
    for owner, maps in outputs.items():
        yield TracedTensor(modules[owner], "tokens", tuple(maps))


def _traced_head_norms(chunk: Qwen3VLModel, attention: Any, name: str) -> Iterator[TracedTensor]:
    """Yield the tensors of the query and key norms, whose columns are this TP rank's heads."""
    architecture, size, rank = chunk.architecture, _tp_size(), mpu.get_tensor_model_parallel_rank()
    attention.splits_in_one_kernel = False  # which would keep the norms' outputs to itself
    for module, point, heads in (
        (attention.q_layernorm, f"{name}.q_norm", architecture.num_attention_heads),
        (attention.k_layernorm, f"{name}.k_norm", architecture.num_key_value_heads),
    ):
        local_heads = max(heads // size, 1)
        first = rank * heads // size
        # With fewer heads than ranks, several ranks hold the same one; the first answers for it.
        split = size > 1 and (heads >= size or rank % (size // heads) == 0)
        reference = slice(
            first * architecture.head_dim, (first + local_heads) * architecture.head_dim
        )
        yield TracedTensor(
            module,
            "tokens",
            (ColumnMap(point, reference=reference, split=split),),
            wide=2,
            shared=heads < size,
        )


def _traced_logits(chunk: Qwen3VLModel) -> TracedTensor:
    """Return the logits, whose columns are this TP rank's vocabulary rows without padding."""
    size, rank = _tp_size(), mpu.get_tensor_model_parallel_rank()
    width = chunk.vocab_size // size
    stop = min((rank + 1) * width, chunk.architecture.vocab_size)
    rows = max(stop - rank * width, 0)
    reference = slice(rank * width, rank * width + rows)
    columns = (ColumnMap("lm_head", slice(0, rows), reference, size > 1),)
    return TracedTensor(chunk.output_layer, "tokens", columns)


def _tp_size() -> int:
    return int(mpu.get_tensor_model_parallel_world_size())
