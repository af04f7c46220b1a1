"""Experiments on correct vision features that arrive in the wrong place or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.probe_points import TEXT, VISUAL, ProbePoint
from mcore_qwen3vl.verify.trace.result import Cause

MERGERS = f"{VISUAL}.deepstack_merger_list"


def find_fusion(divergence: Divergence, _: ProbePoint) -> Iterator[Cause | None]:
    """Test whether placeholders hold no feature, or one that belongs to another placeholder."""
    text = divergence.select(divergence.recording.values[f"{TEXT}.embed_tokens"])
    yield divergence.test(
        "features not fused",
        "Placeholders keep their text embeddings: no visual feature was put in.",
        text,
    )
    yield _reordered(divergence, "feature order", text, f"{VISUAL}.merger", add=False)


def find_deepstack(divergence: Divergence, point: ProbePoint) -> Iterator[Cause | None]:
    """Test whether a decoder layer adds no features, another layer's, or its own out of order."""
    if divergence.recording.micro.visual is None:
        return
    layer = int(point.name.rpartition(".")[2])
    calls = divergence.recording.calls[point.name]
    before = divergence.recording.assemble(point, [output for _, _, output in calls])
    before = divergence.select(before)
    count = len(divergence.architecture.vision.deepstack_visual_indexes)
    if layer < count:
        yield divergence.test(
            "missing DeepStack",
            f"No DeepStack features are added after decoder layer {layer}.",
            before,
        )
    for other in range(count):
        features = divergence.recording.values[f"{MERGERS}.{other}"]
        yield divergence.test(
            "DeepStack layer",
            f"After decoder layer {layer} the features of DeepStack merger {other} are added.",
            _placed(divergence, before, features, add=True),
        )
    if layer < count:
        yield _reordered(divergence, "DeepStack order", before, f"{MERGERS}.{layer}", add=True)


@torch.no_grad()
def find_merger(divergence: Divergence, point: ProbePoint) -> Iterator[Cause | None]:
    """Test whether a DeepStack merger is fed by another block than the config says."""
    number = int(point.name.rpartition(".")[2])
    vision = divergence.architecture.vision
    right = vision.deepstack_visual_indexes[number]
    merger = divergence.model.get_submodule(point.name)
    note = divergence.config_note("vision.deepstack_visual_indexes")
    for block in range(vision.depth):
        yield divergence.test(
            "DeepStack layer",
            f"DeepStack merger {number} is fed by vision block {block} instead of {right}.{note}",
            merger(divergence.recording.values[f"{VISUAL}.blocks.{block}"]),
        )


def _placed(divergence: Divergence, rows: Tensor, features: Tensor, *, add: bool) -> Tensor:
    """Put `features` (N, H) at the placeholders of `rows` (rows, H), or add them there."""
    micro = divergence.recording.micro
    assert micro.visual is not None  # without images no features differ
    whole = rows.new_zeros(micro.input_ids.numel(), rows.shape[1])
    whole[divergence.rows] = rows
    put = whole.index_add_ if add else whole.index_copy_
    return put(0, micro.visual.token_index, features)[divergence.rows]


def _reordered(
    divergence: Divergence, kind: str, rows: Tensor, merger: str, *, add: bool
) -> Cause | None:
    """Test the order in which each placeholder gets the feature nearest to mcore's value."""
    micro = divergence.recording.micro
    if micro.visual is None:
        return None
    features = divergence.recording.values[merger]
    whole = rows.new_zeros(micro.input_ids.numel(), rows.shape[1])
    whole[divergence.rows] = divergence.actual - rows if add else divergence.actual
    nearest = torch.cdist(whole[micro.visual.token_index], features).argmin(1)
    moved = torch.nonzero(nearest != torch.arange(len(nearest))).flatten().tolist() or [0]
    return divergence.test(
        kind,
        f"{len(moved)} of {len(nearest)} placeholders are given another's feature: number "
        f"{moved[0]} has that of number {int(nearest[moved[0]])}.",
        _placed(divergence, rows, features[nearest], add=add),
    )
