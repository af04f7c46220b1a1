"""How one parallel layout cuts the table into Megatron's legacy files, one for each rank's model.

``--ckpt-format torch`` saves what ``state_dict()`` returns on a rank. So names are those of the
layer spec, layers and experts are numbered from zero on every rank, and each rank has its part of a
tensor. The table says what a tensor is and along which axis it is cut; this module only says which
rank gets which part, and under which name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.table import EMBEDDING, Row
from mcore_qwen3vl.converters.storage.boxes import Box, Shape
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout

Spec = Literal["te", "torch"]
"""The layer spec that decides the parameters' names."""

FILE = "model_optim_rng.pt"
OUTPUT, FINAL_NORM = "output_layer.weight", "decoder.final_layernorm.weight"
_LAYERS, _SEQUENTIAL = "decoder.layers.", "mlp.experts.local_experts."
_STANDALONE_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms that Transformer Engine, but not the torch spec, fuses into the next linear layer."""


@dataclass(frozen=True)
class Rank:
    """One model-parallel position; all ranks in it hold the same parameters."""

    tp: int
    pp: int
    ep: int

    def folder(self, layout: Layout) -> str:
        """Return the name of the rank's folder.

        Source: ``megatron.training.checkpointing.get_checkpoint_name``.
        """
        name = f"mp_rank_{self.tp:02d}"
        name += f"_{self.pp:03d}" if layout.pp > 1 else ""
        return name + (f"_{self.ep:03d}" if layout.ep > 1 else "")

    def share(self, row: Row, layout: Layout) -> tuple[int, int]:
        """Return which part of `row` the rank holds, and of how many along the row's TP axis.

        Megatron numbers TP and ETP ranks along the same axis, so the ETP rank follows from the TP
        rank if ETP divides TP.
        """
        if row.expert is None:
            return self.tp, layout.tp
        return self.tp % layout.etp, layout.etp


def require_equal_parts(a: Architecture) -> None:
    """Raise BadInput for a model whose tensors a rank does not hold in equal parts of one kind."""
    if a.delta_net is not None:
        raise BadInput(
            "The legacy format (--format torch) is neither written nor read for Qwen3.5, whose "
            "delta nets join six tensors of unequal sizes in each rank's file: use torch_dist, "
            "which loads under any layout."
        )


def ranks_with_files(layout: Layout) -> list[Rank]:
    """Return one rank per file: the pairs of TP and EP rank that occur in each pipeline stage."""
    numbers = range(lcm(layout.tp, layout.etp * layout.ep))
    pairs = {(n % layout.tp, n // layout.etp % layout.ep) for n in numbers}
    return [Rank(tp, pp, ep) for pp in range(layout.pp) for tp, ep in sorted(pairs)]


@dataclass(frozen=True)
class Stage:
    """One pipeline chunk.

    Attributes:
        pp, vp: pipeline rank, and virtual stage on that rank.
        layers: indices of its decoder layers in the whole model.
        last: whether it holds the head.
    """

    pp: int
    vp: int
    layers: range
    last: bool


def pipeline_stages(counts: Sequence[Sequence[int]]) -> list[Stage]:
    """Return the pipeline's chunks, of ``counts[vp][pp]`` layers, in the order of the network."""
    pipeline: list[Stage] = []
    start, chunks = 0, sum(len(of_pp) for of_pp in counts)
    for vp, of_pp in enumerate(counts):
        for pp, count in enumerate(of_pp):
            layers = range(start, start + count)
            pipeline.append(Stage(pp, vp, layers, len(pipeline) == chunks - 1))
            start += count
    return pipeline


def share_out(rows: Iterable[Row], pipeline: Sequence[Stage], *, tied: bool) -> list[list[Row]]:
    """Return the rows of each chunk.

    If the embedding is tied and the last chunk does not hold it, Megatron gives that chunk a copy
    as its output layer. The table has no row for the copy, so one is added here.
    """
    first, last = pipeline[0], pipeline[-1]
    shares: dict[Stage, list[Row]] = {stage: [] for stage in pipeline}
    of_layer = {layer: stage for stage in pipeline for layer in stage.layers}
    for row in rows:
        if row.layer is not None:
            if row.layer in of_layer:
                shares[of_layer[row.layer]].append(row)
            continue
        shares[last if row.key in (OUTPUT, FINAL_NORM) else first].append(row)
        if tied and row.key == EMBEDDING and first != last:
            shares[last].append(replace(row, key=OUTPUT))
    return list(shares.values())


def model_key(vp: int, vpp: int) -> str:
    """Return the key under which a rank's file has the state of virtual stage `vp`."""
    return f"model{vp}" if vpp > 1 else "model"


def local_name(row: Row, stage: Stage, experts: int, spec: Spec) -> str:
    """Return the parameter's name on a rank that holds `experts` experts of a layer."""
    layer, expert = row.layer, row.expert
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
    """Yield the names of the ``_extra_state`` that ``state_dict()`` has beside parameter `name`.

    Linear layers and standalone norms have one (FP8 scales; None or empty without FP8). So have
    mcore's own linear layers in the torch spec, which keep a place for it.
    """
    if not name.startswith(_LAYERS) and name not in (OUTPUT, FINAL_NORM):
        return
    if not row.key.endswith(".weight") or ".router." in name:
        return  # a fused norm, or the standalone norm that replaces it in the torch spec
    yield f"{name.rpartition('.')[0]}._extra_state"
    if spec == "te" and name.endswith("linear_proj.weight"):
        yield name.replace("linear_proj.weight", "core_attention._extra_state")


def rank_boxes(row: Row, shape: Shape, index: int, size: int) -> list[Box]:
    """Return the boxes of one TP rank's part of a row's piece, in order along the TP axis."""
    full = tuple(slice(0, n) for n in shape)
    axis = row.tp_axis
    if axis is None or axis >= len(shape):
        return [full]
    part = shape[axis] // row.tp_parts
    width = part // size
    starts = (number * part + index * width for number in range(row.tp_parts))
    return [(*full[:axis], slice(at, at + width), *full[axis + 1 :]) for at in starts]
