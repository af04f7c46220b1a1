"""Bad samples are counted and named, and too many of them, or none usable, end the run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig, Source
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.losses.classify import ClassificationRecords
from mcore_qwen3vl.losses.embedding import Embedding
from mcore_qwen3vl.losses.kto import KtoLoss
from mcore_qwen3vl.losses.preference import PreferenceLoss
from mcore_qwen3vl.losses.reranker import Reranker
from mcore_qwen3vl.losses.reward import Reward
from tests.data.conftest import WriteJsonl, chat, question, write_png, write_tar
from tests.data.loaders import MakeLoader, lines
from tests.turns import slow

ANY = DataConfig(seq_length=64, max_bad_fraction=1, shuffle_buffer=3, packing_buffer=4)
CONFIGS = {
    "rows": ANY,
    "packed": replace(ANY, packing=True, balance=False),
    "balanced": replace(ANY, packing=True, balance=True),
    "in order": replace(ANY, shuffle=False),
    "pairs": replace(ANY, records=PreferenceLoss.records),
    "labelled": replace(ANY, records=KtoLoss.records),
    "packed pairs": replace(ANY, records=PreferenceLoss.records, packing=True),
    "embedding": replace(ANY, records=Embedding.records),
    "reranker": replace(ANY, records=Reranker.records),
    "reward": replace(ANY, records=Reward.records),
    "classify": replace(ANY, records=ClassificationRecords(Labels(("a", "b")))),
}
COUNT = 6


@pytest.fixture(autouse=True)
def _finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail, in place of reading for ever."""
    plan, calls = Preparation._json_record, [0]

    def count(self: Preparation, sample: Any) -> Any:
        calls[0] += 1
        if calls[0] > 5000:
            pytest.fail("it reads on without an end")
        return plan(self, sample)

    monkeypatch.setattr(Preparation, "_json_record", count)


def as_jsonl(records: list[Any], folder: Path) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def as_tars(records: list[Any], folder: Path) -> Path:
    members = [(f"{i}.json", json.dumps(record).encode()) for i, record in enumerate(records)]
    write_tar(folder / "tars" / "0.tar", members)
    return folder / "tars"


def use_up(loader: Iterator[Any]) -> str:
    with pytest.raises(BadInput) as error:
        list(islice(loader, 2))
    return str(error.value)


@pytest.mark.parametrize("workers", [0, *slow(2)])
@pytest.mark.parametrize("write", [as_jsonl, as_tars])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_no_record_is_usable(
    config: DataConfig, write: Any, workers: int, make: MakeLoader, tmp_path: Path
) -> None:
    path = write([{"other": i} for i in range(COUNT)], tmp_path)
    # The sizes of balanced work are looked at when the loader is made.
    message = use_up(
        loader for made in [0] for loader in make(path, config=config, num_workers=workers)
    )
    assert f"No record of {path} can be used: all were tried. The first is " in message
    assert "Traceback" not in message


@pytest.mark.parametrize("write", [as_jsonl, as_tars])
@pytest.mark.parametrize("name", ["rows", "packed", "balanced"])
def test_every_record_is_too_long(name: str, write: Any, make: MakeLoader, tmp_path: Path) -> None:
    path = write([question(i, image=False, words=99) for i in range(COUNT)], tmp_path)
    message = use_up(batch for _ in [0] for batch in make(path, config=CONFIGS[name]))
    assert f"No record of {path} can be used" in message
    assert "--overlong truncate" in message


@pytest.mark.parametrize("write", [as_jsonl, as_tars])
@pytest.mark.parametrize("name", ["rows", "packed", "balanced"])
def test_no_image_can_be_decoded(
    name: str, write: Any, make: MakeLoader, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    """The header of each is whole."""
    (tmp_path / "media").unlink()
    (tmp_path / "media").mkdir()
    for number in range(4):
        file = write_png(tmp_path / "media" / f"{number}.png", 30, 40)
        file.write_bytes(file.read_bytes()[:60])
    path = write([question(i) for i in range(COUNT)], tmp_path)
    source = Source(path, media_root=tmp_path)
    config = replace(CONFIGS[name], seq_length=256)
    message = use_up(batch for _ in [0] for batch in make(source, config=config))
    assert "No record of" in message or "finds no record" in message
    assert "media/" in message


@pytest.mark.parametrize("name", ["rows", "packed", "balanced"])
def test_the_data_set_of_a_mixture_that_has_none_is_named(
    name: str, make: MakeLoader, write_jsonl: WriteJsonl
) -> None:
    good = write_jsonl([question(i, image=False) for i in range(COUNT)], "good.jsonl")
    bad = write_jsonl([{"other": i} for i in range(COUNT)], "bad.jsonl")
    with pytest.raises(BadInput, match=rf"No record of {bad} can be used"):
        list(islice(make(good, bad, config=CONFIGS[name]), 20))


def test_one_usable_record_of_many_is_enough(make: MakeLoader, write_jsonl: WriteJsonl) -> None:
    """A rank whose own records are all bad goes on beside the others."""
    records: list[Any] = [{"other": i} for i in range(12)]
    records[7] = question(7, image=False)
    path = write_jsonl(records)
    loaders = [make(path, config=CONFIGS["in order"], dp_rank=rank, dp_size=2) for rank in range(2)]
    read = [[lines(next(loader)) for loader in loaders] for _ in range(6)]
    assert [one for _, one in read] == [[], [], [], [7], [], []]
    assert [zero for zero, _ in read] == [[]] * 6


def test_a_worker_whose_tars_have_none_ends(make: MakeLoader, tmp_path: Path) -> None:
    """It has no batch to give, and the other rank would wait for it."""
    for shard, records in enumerate(
        ([question(i, image=False) for i in range(9)], [{"other": i} for i in range(9)])
    ):
        write_tar(
            tmp_path / "tars" / f"{shard}.tar",
            [(f"{shard}{i}.json", json.dumps(r).encode()) for i, r in enumerate(records)],
        )
    ends = []
    for rank in range(2):
        loader = make(tmp_path / "tars", config=ANY, dp_rank=rank, dp_size=2)
        try:
            next(loader)
        except BadInput as error:
            ends.append(str(error))
    (message,) = ends
    assert message.startswith("A data worker finds no record that it can use in its part")
    assert "lower --num-workers or the data-parallel size" in message


@pytest.mark.parametrize("name", ["rows", "pairs", "classify"])
def test_validation_data(name: str, make: MakeLoader, write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{"other": i} for i in range(COUNT)])
    loader = make(path, config=CONFIGS[name], split="val", batches=2)
    assert "No record of" in use_up(loader)


def test_a_large_data_set_is_tried_at_random(
    make: MakeLoader, write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usable half lies behind the other, and few records are read until one is found."""
    module = "mcore_qwen3vl.data.encoding.encoder._TRIED"
    monkeypatch.setattr(module, 20)
    path = write_jsonl(
        [*({"other": i} for i in range(100)), *(question(i, image=False) for i in range(100))]
    )
    loader = make(path, config=CONFIGS["in order"])
    assert next(loader).is_spare
    path = write_jsonl([{"other": i} for i in range(100)], "all.jsonl")
    message = use_up(make(path, config=CONFIGS["in order"]))
    assert "20, drawn from all of them, were tried" in message


BAD = {
    2: "{broken json",
    5: chat(("user", "q"), ("assistant", " ")),
    7: {**chat(("user", "<image>"), ("assistant", "a")), "images": ["media/gone.png"]},
    8: {**chat(("user", "<image>"), ("assistant", "a")), "images": ["cut.png"]},
    11: chat(("user", "<image>"), ("assistant", "a")),
    12: chat(("user", "<|image_pad|>"), ("assistant", "a")),
}


@pytest.fixture
def flawed(write_jsonl: WriteJsonl, media: Path, tmp_path: Path) -> Path:
    (tmp_path / "cut.png").write_bytes((media / "2.png").read_bytes()[:2000])
    good: list[Any] = [question(i) for i in range(16)]
    return write_jsonl([BAD.get(i, record) for i, record in enumerate(good)])


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("workers", [0, *slow(1)])
def test_bad_samples_are_skipped_counted_and_named(
    workers: int,
    packing: bool,
    make: MakeLoader,
    flawed: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = DataConfig(
        seq_length=256, shuffle=False, packing=packing, packing_buffer=4, max_bad_fraction=1
    )
    loader = make(flawed, config=config, num_workers=workers)
    seen: list[int] = []
    skipped = 0
    with caplog.at_level(logging.WARNING):
        while len(seen) < 20:  # two epochs of ten good samples
            batch = next(loader)
            seen += lines(batch)
            skipped += batch.counts.skipped
    assert sorted(set(seen)) == [i for i in range(16) if i not in BAD]
    assert skipped == len(BAD)  # each is counted once, in either epoch
    if workers == 0:  # a worker process logs for itself
        for line in BAD:
            named = [m for m in caplog.messages if f"data.jsonl:{line + 1} skipped: " in m]
            assert len(named) == 1, line
        assert "media/gone.png: No such file" in caplog.text


@pytest.mark.parametrize("workers", [0, *slow(1)])
def test_too_many_bad_samples_stop_the_run(workers: int, make: MakeLoader, flawed: Path) -> None:
    config = DataConfig(seq_length=256, shuffle=False, max_bad_fraction=0.25, bad_fraction_floor=12)
    loader = make(flawed, config=config, num_workers=workers)
    with pytest.raises(BadInput) as stop:
        list(islice(loader, 20))
    message = str(stop.value)
    assert message.startswith("5 of about 16 records are bad, more than the accepted share of 0.25")
    assert "data.jsonl:12" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(("bad", "stops"), [(1, False), (2, True)])
def test_the_share_of_bad_records_is_that_of_the_data_set(
    bad: int, stops: bool, make: MakeLoader, write_jsonl: WriteJsonl
) -> None:
    """One line of 31 is 3.2 %, however often and by however many workers it is read."""
    good = [question(i, image=False) for i in range(31 - bad)]
    path = write_jsonl(["{broken json", good.pop(), *["{broken json"] * (bad - 1), *good])
    loader = make(path, config=DataConfig(seq_length=256, shuffle=False), dp_size=2)
    if not stops:
        batches = [next(loader) for _ in range(70)]  # two epochs
        assert sum(batch.counts.skipped for batch in batches) == 1
        return
    with pytest.raises(BadInput, match="2 of about 31 records are bad, more than the accep"):
        list(islice(loader, 2))


def test_overlong_samples_are_counted_apart_and_never_stop(
    make: MakeLoader, write_jsonl: WriteJsonl
) -> None:
    path = write_jsonl([question(i, image=False, words=2 + 98 * (i % 2)) for i in range(10)])
    config = DataConfig(seq_length=128, shuffle=False, max_bad_fraction=0.0)
    loader = make(path, config=config)
    batches = [next(loader) for _ in range(10)]
    assert [lines(b) for b in batches] == [[0], [], [2], [], [4], [], [6], [], [8], []]
    assert [b.counts.dropped for b in batches] == [0, 1] * 5
    assert not any(b.counts.skipped for b in batches)


def test_overlong_samples_alone_stop(
    make: MakeLoader, write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_qwen3vl.data.encoding.guard.OVERLONG_IN_A_ROW", 25)
    path = write_jsonl([question(i, image=False, words=100 * (i < 30)) for i in range(31)])
    loader = make(path, config=DataConfig(seq_length=128, shuffle=False))
    with pytest.raises(BadInput, match=r"last 25 samples .* over-long.*Raise --seq-length"):
        list(islice(loader, 25))
