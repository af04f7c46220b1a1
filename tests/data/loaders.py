"""Loaders over real files, and comparisons of their batches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mcore_qwen3vl.data import Batch, DataConfig, Loader

MakeLoader = Callable[..., Loader]

PACKED = DataConfig(seq_length=256, packing=True, packing_buffer=8, shuffle_buffer=7)
IN_ORDER = DataConfig(seq_length=256, shuffle=False)


def lines(batch: Batch) -> list[int]:
    """Return the lines of a batch's samples in their JSONL, from 0; names count from 1."""
    return [int(name.rsplit(":", 1)[1]) - 1 for name in batch.names]


def same(left: Batch, right: Batch) -> bool:
    for name in ("input_ids", "labels", "loss_weights", "position_ids"):
        if not torch.equal(getattr(left, name), getattr(right, name)):
            return False
    if left.visual is None or right.visual is None:
        if left.visual is not right.visual:
            return False
    elif not torch.equal(left.visual.pixel_values, right.visual.pixel_values):
        return False
    return left.names == right.names and left.counts == right.counts
