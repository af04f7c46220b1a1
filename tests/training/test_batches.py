"""One reader for a TP x CP group: everyone gets the same batches, errors included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.batch import Batch
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training.batches import SharedBatches
from tests.training.toy import batch


def stream(path: Path) -> Iterator[Batch]:
    """With an image, without, and then the end."""
    architecture = Architecture.from_hf(path)
    torch.manual_seed(5)
    yield batch(architecture, image=True)
    yield batch(architecture, image=False)
    raise BadInput("too many bad samples")


def shared(path: Path, chunks: int) -> tuple[list[float | None], int, str]:
    loader = stream(path) if dist.get_rank() == 0 else None
    shown: list[Batch] = []
    batches = SharedBatches(
        loader, device=torch.device("cpu"), group=dist.group.WORLD, host_group=dist.group.WORLD,
        chunks=chunks, on_batch=[shown.append],
    )  # fmt: skip
    streams = [batches.chunk(index) for index in range(chunks)]
    pixels = []
    for _ in range(2):
        for received in [next(one) for one in streams]:
            visual = received.visual
            pixels.append(None if visual is None else float(visual.pixel_values.double().sum()))
    try:
        next(streams[0])
    except BadInput as error:
        return pixels, len(shown), str(error)
    raise AssertionError("the error did not arrive")


@pytest.mark.parametrize(("ranks", "chunks"), [(1, 1), (2, 1), (2, 2)])
def test_every_rank_and_chunk_sees_the_readers_batches(
    ranks: int, chunks: int, dense: Path
) -> None:
    results = run_layout(shared, ranks, dense, chunks)
    assert all(result == results[0] for result in results)
    pixels, shown, error = results[0]
    assert pixels[0] is not None
    assert pixels[0] != 0
    assert pixels == [pixels[0]] * chunks + [None] * chunks
    assert shown == 2  # each batch once, whatever the number of chunks
    assert error == "too many bad samples"
