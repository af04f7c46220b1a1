"""The probe points in a running, sharded Megatron model: the tensor, rows and columns of each.

Modules are paired by the table that maps the weights. The rows of a weight that this rank holds are
the columns of its output, and a row-parallel weight's columns are those of its input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from mcore_qwen3vl.converters.live.sharded import hf_parts
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.verify.trace.probe_points import TEXT, VISUAL, ProbePoint, Rows, cosine_and_sine


@dataclass(frozen=True)
class ColumnMap:
    """The columns of a probe point that a local tensor holds.

    Attributes:
        local, reference: the columns in the local tensor and at the probe point.
        split: whether other ranks of the TP group hold other columns.
    """

    point: str
    local: slice = slice(None)
    reference: slice = slice(None)
    split: bool = False


@dataclass(frozen=True)
class Hook:
    """A tensor that a module of this chunk takes or returns.

    Attributes:
        rows: what its rows stand for; tokens are sequence-major.
        columns: the columns of probe points that it holds.
        pick: returns the tensor from the input or output.
        spread: brings that tensor into the compared form.
        wide: number of trailing axes that make the columns.
        shared: whether several ranks hold the same columns, each with part of their gradient.
    """

    module: nn.Module
    rows: Rows
    columns: tuple[ColumnMap, ...]
    side: str = "output"
    pick: Callable[[Any], Tensor] = lambda value: value[0] if isinstance(value, tuple) else value
    spread: Callable[[Tensor], Tensor] = lambda tensor: tensor
    wide: int = 1
    shared: bool = False

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the compared form of `tensor` as (rows, columns)."""
        return self.spread(tensor).flatten(-self.wide).flatten(0, -2)


def hooks_of(chunk: Qwen3VLModel, points: list[ProbePoint]) -> Iterator[Hook]:
    """Yield this chunk's tensors to compare at `points`; other points are on other pipeline stages.

    A norm that Transformer Engine fuses into the next linear layer has no output to compare.
    """
    if chunk.pre_process:
        yield from _tower(chunk, points)
        yield _whole(chunk.embedding, f"{TEXT}.embed_tokens")
    yield Hook(
        chunk.rotary_pos_emb,
        "tokens",
        (ColumnMap(f"{TEXT}.rotary_emb"),),
        spread=lambda angles: (
            cosine_and_sine((angles.cos(), angles.sin())) * chunk.rotary_pos_emb.attention_scaling
        ),
    )
    yield from _linears_and_norms(chunk)
    for layer in chunk.decoder.layers:
        number = layer.layer_number - 1
        name = f"{TEXT}.layers.{number}"
        if number == 0:
            yield _whole(layer, f"{TEXT}.inputs_embeds", side="input")
        yield from _head_norms(chunk, layer.self_attention, f"{name}.self_attn")
        if chunk.architecture.moe_layers[number]:
            yield _whole(layer.mlp.router, f"{name}.mlp.gate")
            yield _whole(layer.mlp, f"{name}.mlp.experts")
        yield _whole(layer, name)
    if chunk.post_process:
        yield _head(chunk)


def _whole(module: nn.Module, point: str, side: str = "output") -> Hook:
    return Hook(module, "tokens", (ColumnMap(point),), side)


def _tower(chunk: Qwen3VLModel, points: list[ProbePoint]) -> Iterator[Hook]:
    """Yield the hooks of the vision tower, which keeps its Hugging Face names."""
    for point in points:
        if not point.name.startswith(VISUAL):
            continue
        module = chunk.visual.get_submodule(point.module.removeprefix(f"{VISUAL}."))
        wide = 2 if point.name.endswith("pos_embed") else 1
        yield Hook(module, point.rows, (ColumnMap(point.name),), pick=point.pick, wide=wide)


def _linears_and_norms(chunk: Qwen3VLModel) -> Iterator[Hook]:
    """Yield the hooks of the decoder's linear layers and norms, found by their weights."""
    modules = dict(chunk.named_modules())
    outputs: dict[str, list[ColumnMap]] = defaultdict(list)
    used: dict[str, int] = defaultdict(int)  # columns of a module's output so far
    for part in hf_parts([chunk]):
        owner, point = (n.rpartition(".")[0] for n in (part.parameter, part.name))
        elsewhere = (".experts", "router", "q_layernorm", "k_layernorm", ".layer_norm_weight")
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
        if point.endswith("o_proj"):
            assert isinstance(columns[0], slice)
            held = slice(0, columns[0].stop - columns[0].start)
            of_input = ColumnMap(f"{point}:input", held, columns[0], _tp_size() > 1)
            yield Hook(modules[owner], "tokens", (of_input,), "input")
    for owner, maps in outputs.items():
        yield Hook(modules[owner], "tokens", tuple(maps))


def _head_norms(chunk: Qwen3VLModel, attention: Any, name: str) -> Iterator[Hook]:
    """Yield the hooks of the query and key norms, whose columns are this TP rank's heads."""
    a, size, rank = chunk.architecture, _tp_size(), mpu.get_tensor_model_parallel_rank()
    for module, point, heads in (
        (attention.q_layernorm, f"{name}.q_norm", a.num_attention_heads),
        (attention.k_layernorm, f"{name}.k_norm", a.num_key_value_heads),
    ):
        held = max(heads // size, 1)
        first = rank * heads // size
        # With fewer heads than ranks, several ranks hold the same one; the first answers for it.
        split = size > 1 and (heads >= size or rank % (size // heads) == 0)
        reference = slice(first * a.head_dim, (first + held) * a.head_dim)
        yield Hook(
            module,
            "tokens",
            (ColumnMap(point, reference=reference, split=split),),
            wide=2,
            shared=heads < size,
        )


def _head(chunk: Qwen3VLModel) -> Hook:
    """Return the head's hook, whose columns are this TP rank's vocabulary rows without padding."""
    size, rank = _tp_size(), mpu.get_tensor_model_parallel_rank()
    width = chunk.vocab_size // size
    stop = min((rank + 1) * width, chunk.architecture.vocab_size)
    held = max(stop - rank * width, 0)
    reference = slice(rank * width, rank * width + held)
    columns = (ColumnMap("lm_head", slice(0, held), reference, size > 1),)
    return Hook(chunk.output_layer, "tokens", columns)


def _tp_size() -> int:
    return int(mpu.get_tensor_model_parallel_world_size())
