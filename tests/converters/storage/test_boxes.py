"""Chunks that do not fill a tensor exactly once are noticed."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl.converters.mapping.rearrangement import Rearrangement
from mcore_qwen3vl.converters.mapping.table import Row
from mcore_qwen3vl.converters.megatron_checkpoint import (
    CheckpointIndex,
    Chunk,
    ChunkedTensor,
    FileRange,
    MegatronCheckpoint,
)
from mcore_qwen3vl.converters.storage.boxes import (
    Extent,
    Shape,
    are_exact_cover,
    boxes_of_flat_range,
)
from mcore_qwen3vl.errors import BadInput


def covered_once(boxes: list[Extent], shape: Shape) -> bool:
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        part = tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))
        counts[part] += 1
    return bool((counts == 1).all())


def cut(rng: random.Random, box: Extent, times: int) -> list[Extent]:
    """Cut a box in two again and again, along any axis, into parts that ranks may have stored."""
    axis = rng.randrange(len(box.sizes))
    if not times or box.sizes[axis] < 2:
        return [box]
    at = rng.randrange(1, box.sizes[axis])
    halves = []
    for start, n in ((0, at), (at, box.sizes[axis] - at)):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += start
        sizes[axis] = n
        halves += cut(rng, Extent(tuple(offsets), tuple(sizes)), times - 1)
    return halves


PINWHEEL = [
    ((0, 0), (1, 2)),
    ((0, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 0), (2, 1)),
    ((1, 1), (1, 1)),
]


def test_against_counting() -> None:
    rng = random.Random(0)
    found = {True: 0, False: 0}
    for _ in range(400):
        shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
        boxes = cut(rng, Extent((0,) * len(shape), shape), 3)
        if rng.random() < 0.7:  # moving one within the tensor leaves a hole, maybe an overlap
            at = rng.randrange(len(boxes))
            moved = (rng.randrange(n - k + 1) for n, k in zip(shape, boxes[at].sizes, strict=True))
            boxes[at] = replace(boxes[at], offsets=tuple(moved))
        rng.shuffle(boxes)
        assert are_exact_cover(boxes, shape) == covered_once(boxes, shape)
        found[covered_once(boxes, shape)] += 1
    assert min(found.values()) > 50
    wheel = [Extent(*box) for box in PINWHEEL]
    assert are_exact_cover(wheel, (3, 3))
    assert not are_exact_cover([*wheel[1:], Extent((0, 1), (1, 2))], (3, 3))


def test_a_layer_is_read_from_chunks_of_several_layers() -> None:
    """Megatron stores each layer and each expert by itself, and its conversion tools do not."""
    whole = torch.arange(9.0).view(3, 3)

    class Stored(MegatronCheckpoint):
        def _read_chunk(self, key: str, chunk: Chunk) -> torch.Tensor:
            (rows, columns), (height, width) = chunk.offsets, chunk.sizes
            return whole[rows : rows + height, columns : columns + width]

        def _unfilled_error(self, key: str) -> BadInput:
            return BadInput("holes")

    chunks = [Chunk(*box, FileRange("", 0, 0)) for box in PINWHEEL]
    stored = Stored(Path(), CheckpointIndex({"w": ChunkedTensor(whole.dtype, (3, 3), chunks)}), [])
    for layer in range(3):
        row = Row("w", (3, 3), (layer,), (), Rearrangement(()))
        assert torch.equal(stored.read_box(row, (slice(0, 3),)), whole[layer])


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (3, 1, 4), (2, 3, 5), (4, 2, 3, 2)])
def test_a_flat_range_is_a_few_boxes_in_order(shape: Shape) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            boxes = list(boxes_of_flat_range(shape, start, stop))
            parts = [
                whole[tuple(slice(a, a + n) for a, n in zip(b.offsets, b.sizes, strict=True))]
                for b in boxes
            ]
            assert [tuple(part.shape) for part in parts] == [box.sizes for box in boxes]
            found = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.arange(0)
            assert found.tolist() == list(range(start, stop))
            assert len(boxes) <= max(2 * len(shape) - 1, 1)
