"""One reader for a TP x CP group: everyone gets the same batches, errors included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training.feed.batches import SharedBatches
from mcore_qwen3vl.training.feed.stages import StageFeed
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


def staged(path: Path) -> tuple[list[tuple[str, int, float]], list[str], str]:
    """Two stages of two ranks; the second asks only after the first has read everything."""
    stage, place = divmod(dist.get_rank(), 2)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    readers = dist.new_group([0, 2])
    shown: list[Batch] = []
    batches = SharedBatches(
        stream(path) if dist.get_rank() == 0 else None, device=torch.device("cpu"),
        group=groups[stage], host_group=groups[stage],
        feed=StageFeed(readers, tag=3) if place == 0 else None, on_batch=[shown.append],
    ).chunk(0)  # fmt: skip
    if stage == 1:
        dist.barrier()
    seen = []
    for received in [next(batches), next(batches)]:
        visual = received.visual
        pixels = "none" if visual is None else visual.pixel_values.device.type
        index = 0 if visual is None else int(visual.token_index.sum())
        seen.append((pixels, index, float(received.input_ids.double().sum())))
    try:
        next(batches)
    except BadInput as error:
        if stage == 0:
            dist.barrier()
        return seen, [type(batch).__name__ for batch in shown], str(error)
    raise AssertionError("the error did not arrive")


def test_later_stages_get_all_but_pixels_and_the_first_never_waits(dense: Path) -> None:
    results = run_layout(staged, 4, dense)
    first, later = results[0], results[2]
    assert results[1] == first
    assert results[3] == later
    assert [pixels for pixels, *_ in first[0]] == ["cpu", "none"]
    assert [pixels for pixels, *_ in later[0]] == ["meta", "none"]
    assert [rest for _, *rest in first[0]] == [rest for _, *rest in later[0]]
    assert first[0][0][1] == 1 + 2 + 3 + 4
    assert first[1:] == later[1:] == (["Batch", "Batch"], "too many bad samples")
