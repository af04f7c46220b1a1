"""How one parallel layout cuts the table into Megatron's legacy files, one for each rank's model.

``--ckpt-format torch`` saves what ``state_dict()`` gives on a rank. So names are those of the layer
spec, layers and experts count from zero on every rank, and each rank has its part of a tensor. What
a tensor is and along which axis it is cut, the table says; here is only who gets which part, and
under which name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

from mcore_qwen3vl.converters.mapping.row import Row
from mcore_qwen3vl.converters.mapping.table import EMBEDDING
from mcore_qwen3vl.converters.storage.boxes import Box, Shape
from mcore_qwen3vl.layout import Layout

Spec = Literal["te", "torch"]
"""Layer spec whose parameter names are meant."""

FILE = "model_optim_rng.pt"
OUTPUT, FINAL_NORM = "output_layer.weight", "decoder.final_layernorm.weight"
_LAYERS, _SEQUENTIAL = "decoder.layers.", "mlp.experts.local_experts."
_STANDALONE_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms that Transformer Engine fuses into the linear after them and the torch spec does not."""


@dataclass(frozen=True)
class Legacy:
    """What a legacy checkpoint is for: it loads under this layout and this layer spec only.

    Attributes:
        layout: parallel sizes; CP, DP and SP do not matter.
        spec: whose parameter names are written.
    """

    layout: Layout
    spec: Spec = "te"


@dataclass(frozen=True)
class Rank:
    """The ranks of one model-parallel position: they hold the same parameters."""

    tp: int
    pp: int
    ep: int

    def folder(self, layout: Layout) -> str:
        """Source: ``megatron.training.checkpointing.get_checkpoint_name``."""
        name = f"mp_rank_{self.tp:02d}"
        name += f"_{self.pp:03d}" if layout.pp > 1 else ""
        return name + (f"_{self.ep:03d}" if layout.ep > 1 else "")

    def share(self, row: Row, layout: Layout) -> tuple[int, int]:
        """Which of how many equal parts of `row` the rank holds, along the row's TP axis.

        Megatron numbers TP and ETP ranks along the same axis, so that where ETP divides TP, the
        TP rank tells the ETP rank.
        """
        if layer_and_expert(row)[1] is None:
            return self.tp, layout.tp
        return self.tp % layout.etp, layout.etp


def ranks(layout: Layout) -> list[Rank]:
    """One for each file: the pairs of TP and EP rank that occur in a pipeline stage."""
    numbers = range(lcm(layout.tp, layout.etp * layout.ep))
    pairs = {(n % layout.tp, n // layout.etp % layout.ep) for n in numbers}
    return [Rank(tp, pp, ep) for pp in range(layout.pp) for tp, ep in sorted(pairs)]


@dataclass(frozen=True)
class Stage:
    """One pipeline chunk.

    Attributes:
        pp, vp: pipeline rank and virtual stage on it.
        layers: decoder layers, counted over the whole model.
        first, last: whether it embeds, and whether it ends in the head.
    """

    pp: int
    vp: int
    layers: range
    first: bool
    last: bool


def stages(counts: Sequence[Sequence[int]]) -> list[Stage]:
    """The pipeline's chunks in the order of the network.

    Args:
        counts: decoder layers of each chunk; ``counts[vp][pp]``.
    """
    found: list[Stage] = []
    start, chunks = 0, sum(len(of_pp) for of_pp in counts)
    for vp, of_pp in enumerate(counts):
        for pp, count in enumerate(of_pp):
            number = len(found)
            layers = range(start, start + count)
            found.append(Stage(pp, vp, layers, number == 0, number == chunks - 1))
            start += count
    return found


def share_out(rows: Iterable[Row], pipeline: Sequence[Stage], *, tied: bool) -> list[list[Row]]:
    """The rows of each chunk.

    Where the embedding is tied and the last chunk does not have it, Megatron gives that chunk a
    copy as its output layer: a row that the table does not have.
    """
    first, last = pipeline[0], pipeline[-1]
    held: dict[Stage, list[Row]] = {stage: [] for stage in pipeline}
    of_layer = {layer: stage for stage in pipeline for layer in stage.layers}
    for row in rows:
        layer, _ = layer_and_expert(row)
        if layer is not None:
            if layer in of_layer:
                held[of_layer[layer]].append(row)
            continue
        held[last if row.key in (OUTPUT, FINAL_NORM) else first].append(row)
        if tied and row.key == EMBEDDING and first != last:
            held[last].append(replace(row, key=OUTPUT))
    return list(held.values())


def model_key(vp: int, vpp: int) -> str:
    """Under which key a rank's file has the state of virtual stage `vp`."""
    return f"model{vp}" if vpp > 1 else "model"


def layer_and_expert(row: Row) -> tuple[int | None, int | None]:
    """Layer and expert that `row` belongs to."""
    if not row.key.startswith(_LAYERS):
        return None, None
    own = row.key.split(".", 3)[2]  # a layer's number, where layers are not stacked
    layer, *expert = (int(own), *row.offset) if own.isdigit() else row.offset
    return layer, expert[0] if expert else None


def local_name(row: Row, stage: Stage, experts: int, spec: Spec) -> str:
    """The parameter's name on a rank.

    Args:
        row: a row that `stage` holds.
        stage: the chunk.
        experts: how many experts of a layer the rank holds.
        spec: the layer spec.
    """
    layer, expert = layer_and_expert(row)
    if layer is None:
        return row.key
    part = re.sub(r"^\d+\.", "", row.key.removeprefix(_LAYERS))
    if expert is not None:
        linear = part.removeprefix("mlp.experts.experts.")  # linear_fc1.weight
        number = expert % experts
        grouped = spec == "te"
        part = f"mlp.experts.{linear}{number}" if grouped else f"{_SEQUENTIAL}{number}.{linear}"
    elif spec == "torch":
        part = _STANDALONE_NORMS.get(part, part)
    return f"{_LAYERS}{layer - stage.layers.start}.{part}"


def extra_state(row: Row, name: str, spec: Spec) -> Iterator[str]:
    """Names of the ``_extra_state`` that ``state_dict()`` has beside the parameter `name`.

    Linears and standalone norms have one (FP8 scales; None or empty without FP8), in the torch spec
    too where mcore's own linears keep a place for it.
    """
    if not name.startswith(_LAYERS) and name not in (OUTPUT, FINAL_NORM):
        return
    if not row.key.endswith(".weight") or ".router." in name:
        return  # a norm that is fused, or mcore's own standalone stand-in for one
    yield f"{name.rpartition('.')[0]}._extra_state"
    if spec == "te" and name.endswith("linear_proj.weight"):
        yield name.replace("linear_proj.weight", "core_attention._extra_state")


def boxes(row: Row, shape: Shape, index: int, size: int) -> list[Box]:
    """What one TP rank's part of a row's piece is made of, one after another along the TP axis.

    Args:
        row: says along which axis, and in how many parts that are each cut.
        shape: of the whole piece.
        index, size: which of how many ranks.
    """
    whole = tuple(slice(0, n) for n in shape)
    axis = row.tp_axis
    if axis is None or axis >= len(shape):
        return [whole]
    part = shape[axis] // row.tp_parts
    width = part // size
    starts = (number * part + index * width for number in range(row.tp_parts))
    return [(*whole[:axis], slice(at, at + width), *whole[axis + 1 :]) for at in starts]


def local_shape(row: Row, size: int) -> Shape:
    """Shape of one of `size` parts of a row's piece."""
    axis = row.tp_axis
    return tuple(n // size if i == axis else n for i, n in enumerate(row.shape))
