"""One reader serves a TP x CP group: every rank gets the same batches, errors included."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Loader, Source, load_processor
from mcore_qwen3vl.data.encoding.batch import Batch, without_pixels
from mcore_qwen3vl.data.sharing import SharedBatches, StageFeed
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.embedding import Contrast, Scores
from mcore_qwen3vl.losses.kto import Labelled, LabelledReferences
from mcore_qwen3vl.losses.preference import PairReferences
from mcore_qwen3vl.losses.reward import Margins
from mcore_qwen3vl.losses.teacher_file import Top
from mcore_qwen3vl.runtime.launch import run_layout
from tests.training.toy import batch


def stream(path: Path) -> Iterator[Batch]:
    """Yield a batch with an image and one without, then raise an error."""
    architecture = Architecture.from_hf(path)
    torch.manual_seed(5)
    for image in (True, False):
        yield replace(batch(architecture, image), task=Margins(torch.rand(1)))
    raise BadInput("too many bad samples")


def shared(path: Path, chunks: int, ahead: bool) -> tuple[list[float | None], Any, int, str]:
    loader = stream(path) if dist.get_rank() == 0 else None
    shown: list[Batch] = []
    batches = SharedBatches(
        loader, device=torch.device("cpu"), group=dist.group.WORLD, host_group=dist.new_group(),
        chunks=chunks, on_batch=[shown.append],
        ahead=ThreadPoolExecutor(1) if ahead else None,
    )  # fmt: skip
    streams = [batches.chunk(index) for index in range(chunks)]
    pixels, margins = [], []
    for _ in range(2):
        for received in [next(one) for one in streams]:
            visual = received.visual
            pixels.append(None if visual is None else float(visual.pixel_values.double().sum()))
            margins.append(received.inputs_of(Margins).margins.tolist())
    try:
        next(streams[0])
    except BadInput as error:
        return pixels, margins, len(shown), str(error)
    raise AssertionError("the error did not arrive")


@pytest.mark.parametrize(("ranks", "chunks", "ahead"), [(1, 1, True), (2, 1, False), (2, 2, True)])
def test_every_rank_and_chunk_sees_the_readers_batches(
    ranks: int, chunks: int, ahead: bool, dense: Path
) -> None:
    results = run_layout(shared, ranks, dense, chunks, ahead)
    assert all(result == results[0] for result in results)
    pixels, _, shown, error = results[0]
    assert pixels[0] is not None
    assert pixels[0] != 0
    assert pixels == [pixels[0]] * chunks + [None] * chunks
    assert shown == 2  # each batch is shown once, whatever the number of chunks
    assert error == "too many bad samples"


def staged(path: Path) -> tuple[list[tuple[str, int, float]], list[str], str]:
    """Run two stages of two ranks; the second asks only after the first has read everything."""
    stage, place = divmod(dist.get_rank(), 2)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    readers = dist.new_group([0, 2])
    shown: list[Batch] = []
    batches = SharedBatches(
        stream(path) if dist.get_rank() == 0 else None, device=torch.device("cpu"),
        group=groups[stage], host_group=groups[stage],
        feed=StageFeed(readers) if place == 0 else None, on_batch=[shown.append],
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


def in_order() -> list[str]:
    """Ask for each message when the stage before has it, as a stage does that waits for that one's
    activations."""
    rank = dist.get_rank()
    feed = StageFeed(dist.new_group([0, 1, 2]))
    seen = []
    for message in ["first", "second"]:
        if rank > 0:
            dist.recv(torch.zeros(1), rank - 1)
        if feed.is_source:
            feed.send(message)
        seen.append(message if feed.is_source else feed.receive())
        if rank < 2:
            dist.send(torch.zeros(1), rank + 1)
    return seen


def test_a_stage_gets_its_batch_before_the_next_stage_asks() -> None:
    assert run_layout(in_order, 3, timeout=20) == [["first", "second"]] * 3


def alone(
    loader: Iterator[Batch], ahead: ThreadPoolExecutor | None, device: str = "cpu"
) -> SharedBatches:
    """Share batches with no other rank."""
    group = type("Alone", (), {"size": lambda self: 1})()
    return SharedBatches(
        loader,
        device=torch.device(device),
        group=group,  # type: ignore[arg-type]
        host_group=group,  # type: ignore[arg-type]
        ahead=ahead,
    )


def tensors_in(value: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors of a batch by the names of its fields, and of those within."""
    if isinstance(value, Tensor):
        return {name: value}
    found: dict[str, Tensor] = {}
    for field, part in vars(value).items() if is_dataclass(value) else ():
        found |= tensors_in(part, f"{name}.{field}".removeprefix("."))
    return found


TASK_INPUTS = (Top, Contrast, Scores, Labelled, LabelledReferences, PairReferences, Margins)
FOR_THE_HOST = {"cu_seqlens", "visual.grid_thw", "visual.token_index"}


@pytest.mark.parametrize("kind", TASK_INPUTS, ids=lambda kind: kind.__name__)
def test_every_tensor_is_pinned_and_moved_but_those_that_the_host_reads(
    kind: Any, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = batch(Architecture.from_hf(dense), image=True)
    assert plain.visual is not None
    other = replace(plain, visual=without_pixels(plain.visual))
    inputs = {f.name: other if f.type == "Batch" else torch.ones(2) for f in fields(kind)}
    given = replace(plain, task=kind(**inputs))

    def others(one: Batch, chosen: Callable[[Tensor], bool]) -> set[str]:
        left = (name for name, tensor in tensors_in(one).items() if not chosen(tensor))
        return {name.removeprefix("task.mismatched.") for name in left}

    moved = next(alone(iter([given]), None, "meta").chunk(0))
    assert others(moved, lambda tensor: tensor.is_meta) == FOR_THE_HOST
    of_device = moved.device_tensors()
    assert others(moved, lambda t: any(t is each for each in of_device)) == FOR_THE_HOST
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor.to("meta"))
    assert others(given.pin_memory(), lambda tensor: tensor.is_meta) <= FOR_THE_HOST


def test_the_next_batch_is_read_while_this_one_is_worked_on(dense: Path) -> None:
    read = threading.Semaphore(0)

    def slowly() -> Iterator[Batch]:
        for one in stream(dense):
            read.release()
            yield one

    with ThreadPoolExecutor(1) as ahead:
        batches = alone(slowly(), ahead).chunk(0)
        next(batches)
        read.acquire()
        assert read.acquire(timeout=30)  # the second is read, which nobody has asked for
        assert not read.acquire(timeout=0.2)  # the third is not


@pytest.mark.slow
@pytest.mark.parametrize("balance", [False, True])
def test_what_was_read_ahead_comes_again_after_a_resume(
    balance: bool, dense: Path, tmp_path: Path
) -> None:
    records = [
        {"messages": [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "a"}]}
        for i in range(40)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = DataConfig(64, packing=True, packing_buffer=4, balance=balance)

    def make() -> Loader:
        return Loader(
            [Source(tmp_path / "data.jsonl")],
            Architecture.from_hf(dense),
            load_processor(dense),
            config,
            num_workers=2,
            checkpoint_every_seconds=0.0,
        )

    loader = make()
    with ThreadPoolExecutor(1) as ahead:
        shared = alone(loader, ahead)
        batches = shared.chunk(0)
        for _ in range(5):
            next(batches)
        state = loader.state_dict(shared.position())
        expected = [next(batches) for _ in range(4)]
    resumed = make()
    resumed.load_state_dict(state)
    assert [next(resumed).names for _ in range(4)] == [batch.names for batch in expected]


def test_processes_are_started_by_the_main_thread(dense: Path) -> None:
    """Forked from another thread, they hang if the main thread has used PyAV's converter."""
    threads = []

    def noted() -> Iterator[Batch]:
        for one in stream(dense):
            threads.append(threading.current_thread())
            yield one

    with ThreadPoolExecutor(1) as ahead:
        next(alone(noted(), ahead).chunk(0))
        ahead.submit(int).result()
    first, second = threads
    assert first is threading.main_thread()
    assert second is not first
