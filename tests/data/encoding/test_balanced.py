"""Loaders of all ranks balance real files, and lose no sample."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Loader, Source, redistribute
from mcore_qwen3vl.data.encoding import balanced
from mcore_qwen3vl.data.records.reading import BadSample, Reading, SlowSample, is_momentary
from mcore_qwen3vl.data.sizes import Sizes
from mcore_qwen3vl.errors import BadInput, Unfinished
from tests.data.conftest import WriteJsonl, chat, question, write_png
from tests.turns import slow_except

CONFIG = DataConfig(
    seq_length=256,
    packing=True,
    packing_buffer=6,
    shuffle=False,
    balance=True,
    micro_batches=2,
    max_bad_fraction=0.5,
)
RANKS = 3


@pytest.fixture
def make(architecture: Architecture, processor: Any) -> Callable[..., Loader]:
    def one(path: Path, rank: int, config: DataConfig = CONFIG, **options: Any) -> Loader:
        return Loader(
            [Source(path, reading=options.pop("reading", Reading()))],
            architecture,
            copy.deepcopy(processor),
            config,
            dp_rank=rank,
            dp_size=options.pop("ranks", RANKS),
            **{"num_workers": 0, **options},
        )

    return one


@pytest.fixture
def data(write_jsonl: WriteJsonl) -> Path:
    records: list[Any] = [question(i, image=i % 3 > 0, words=i % 29) for i in range(60)]
    records[7] = "{broken"
    records[20] = chat(("user", "q"), ("assistant", ""))
    records[21] = question(21, image=False, words=300)
    return write_jsonl(records)


USABLE = set(range(1, 61)) - {8, 21, 22}


def numbers(batch: Any) -> list[int]:
    return [int(name.rsplit(":", 1)[1]) for name in batch.names]


def test_ranks_share_an_epoch_and_each_bad_sample_is_counted_once(
    make: Callable[..., Loader], data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaders = [make(data, rank) for rank in range(RANKS)]
    seen: list[int] = []
    skipped = dropped = 0
    with caplog.at_level(logging.WARNING):
        while len(set(seen)) < len(USABLE):
            row = [next(loader) for loader in loaders]
            seen += [number for batch in row for number in numbers(batch)]
            skipped += sum(batch.counts.skipped for batch in row)
            dropped += sum(batch.counts.dropped for batch in row)
            assert len(seen) < 3 * len(USABLE)
    assert set(seen) == USABLE
    # A sample waits for at most one buffer, so none is half an epoch ahead of another.
    assert max(Counter(seen).values()) <= 2
    assert (skipped, dropped) == (2, 1)
    for line in (8, 21):
        assert len([m for m in caplog.messages if f"data.jsonl:{line} skipped" in m]) == 1


def sizes_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.sizes"))


def test_sizes_are_measured_once_and_again_when_something_changes(
    make: Callable[..., Loader], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = data.parent / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def files() -> list[Path]:
        return sizes_in(cache)

    make(data, 0)
    (first,) = files()
    stamp = first.stat().st_mtime_ns
    make(data, 1)
    assert files() == [first]
    assert first.stat().st_mtime_ns == stamp
    make(data, 0, replace(CONFIG, seq_length=128))
    assert len(files()) == 2
    data.write_text(data.read_text() + json.dumps(question(1)) + "\n")
    make(data, 0)
    assert len(files()) == 3
    make(data, 0, replace(CONFIG, max_decoded_pixels=1000))
    assert len(files()) == 4


HOOK = """
from pathlib import Path


def as_it_is(record):
    return record


def fails_while_a_disk_does(record):
    if Path(__file__).with_name("fails").exists() and record["messages"][0]["content"] == "0":
        raise OSError(5, "Input/output error")
    return record


def is_slow_while_a_disk_is(record):
    if Path(__file__).with_name("fails").exists() and record["messages"][0]["content"] == "0":
        while True:
            pass
    return record
"""


@pytest.fixture
def hook(write_jsonl: WriteJsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file of hooks beside ten records, whose questions are their numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_jsonl([chat(("user", str(number)), ("assistant", "a")) for number in range(10)])
    (tmp_path / "hooks.py").write_text(HOOK)
    return tmp_path / "hooks.py"


def test_a_mended_hook_measures_again(make: Callable[..., Loader], hook: Path) -> None:
    data, reading = hook.parent / "data.jsonl", Reading(preprocess=f"{hook}:as_it_is")
    for text in (HOOK, HOOK, f"{HOOK}\n# mended"):
        hook.write_text(text)
        make(data, 0, reading=reading)
    assert len(sizes_in(hook.parent)) == 2


@pytest.mark.parametrize("name", ["fails_while_a_disk_does", "is_slow_while_a_disk_is"])
def test_what_a_disk_did_not_deliver_is_measured_again(
    name: str, make: Callable[..., Loader], hook: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the record would be left out of every later run."""
    data, reading = hook.parent / "data.jsonl", Reading(preprocess=f"{hook}:{name}")
    config = replace(CONFIG, max_sample_seconds=0.5)
    (hook.parent / "fails").touch()
    make(data, 0, config, reading=reading, ranks=1)
    (kept,) = sizes_in(hook.parent)
    (flaw,) = Sizes.load(kept).unusable
    assert flaw.momentary
    (hook.parent / "fails").unlink()
    loader = make(data, 0, config, reading=reading, ranks=1)
    assert Sizes.load(kept).unusable == []
    assert "1 samples of" in caplog.text
    assert {number for _ in range(2) for number in numbers(next(loader))} == set(range(1, 11))


def test_which_errors_are_of_the_moment() -> None:
    def raised_from(cause: Exception) -> Exception:
        try:
            raise BadSample("it cannot be read") from cause
        except BadSample as error:
            return error

    assert is_momentary(raised_from(OSError(errno.EIO, "Input/output error")))
    assert is_momentary(SlowSample("it takes more than 60 s"))
    assert not is_momentary(raised_from(FileNotFoundError(errno.ENOENT, "No such file")))
    assert not is_momentary(raised_from(OSError("image file is truncated")))
    assert not is_momentary(KeyError("messages"))


NAMES = ["grows", "shrinks", "comes", "goes", "stays"]
ONCE = replace(CONFIG, seq_length=64, packing_buffer=len(NAMES), max_bad_fraction=1.0)


@pytest.fixture
def pictures(write_jsonl: WriteJsonl, tmp_path: Path) -> Path:
    """Write a record about each of `NAMES`; one image is too large, and one is not there."""
    chats = [chat(("user", "<image>?"), ("assistant", "a")) for _ in NAMES]
    path = write_jsonl(
        [{**one, "images": [f"{name}.png"]} for one, name in zip(chats, NAMES, strict=True)]
    )
    for name in set(NAMES) - {"comes"}:
        write_png(tmp_path / f"{name}.png", *((160, 160) if name == "shrinks" else (32, 32)))
    return path


def replace_pictures(folder: Path, side: int) -> None:
    write_png(folder / "grows.png", side, side)
    for name in ("shrinks", "comes"):
        write_png(folder / f"{name}.png", 32, 32)
    (folder / "goes.png").unlink()


def names_of(loader: Loader, batches: int) -> set[str]:
    return {NAMES[n - 1] for _ in range(batches) for n in numbers(next(loader))}


def test_replaced_media_are_measured_again_at_the_start(
    make: Callable[..., Loader], pictures: Path
) -> None:
    """A record that could not be used is used once its image is there, or small enough."""
    assert names_of(make(pictures, 0, ONCE, ranks=1), 6) == {"grows", "goes", "stays"}
    replace_pictures(pictures.parent, 160)
    assert names_of(make(pictures, 0, ONCE, ranks=1), 6) == {"shrinks", "comes", "stays"}


def test_media_replaced_in_a_run_are_left_out_and_the_sizes_forgotten(
    make: Callable[..., Loader],
    pictures: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not fit the packs that were made for them, and data sets are not compared whole."""
    cache = pictures.parent / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    loader = make(pictures, 0, ONCE, ranks=1)
    assert len(sizes_in(cache)) == 1
    replace_pictures(pictures.parent, 40)
    with caplog.at_level(logging.WARNING):
        assert names_of(loader, 6) == {"stays"}
    assert sizes_in(cache) == []
    assert "tokens and 100 patches, and had" in caplog.text


def test_a_signal_ends_measuring_whatever_the_rank_does_with_it(
    make: Callable[..., Loader], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring processes inherit a rank's handler, which would finish a step first."""

    def killed(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setenv("XDG_CACHE_HOME", str(data.parent / "cache"))
    before = signal.signal(signal.SIGTERM, lambda *args: None)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(balanced.BalancedTaskEncoder, "measure_sample", killed)
            with pytest.raises(
                Unfinished, match=r"measuring .*data.jsonl.* was killed.*--no-balance"
            ):
                make(data, 0)
        assert not sizes_in(data.parent)
        make(data, 0)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("stop", slow_except([0, 1, 5], 1))
def test_resumed_ranks_go_on_with_the_same_rows(
    stop: int, make: Callable[..., Loader], data: Path
) -> None:
    """The rows are the same also where the packer has left samples for the next buffer."""
    loaders = [make(data, rank) for rank in range(RANKS)]
    for _ in range(stop):
        for loader in loaders:
            next(loader)
    states = [loader.state_dict() for loader in loaders]
    resumed = [make(data, rank) for rank in range(RANKS)]
    for loader, state in zip(resumed, states, strict=True):
        loader.load_state_dict(state)
    for _ in range(12):
        for ours, theirs in zip(resumed, loaders, strict=True):
            assert numbers(next(ours)) == numbers(next(theirs))


def test_a_file_that_vanished_after_measuring_is_a_bad_sample(
    make: Callable[..., Loader], write_jsonl: WriteJsonl, tmp_path: Path, media: Path
) -> None:
    (tmp_path / "x.png").write_bytes((media / "0.png").read_bytes())
    records = [question(i, words=4) for i in range(12)]
    records[3]["images"] = ["x.png"]
    loader = make(write_jsonl(records), 0, ranks=1)
    (tmp_path / "x.png").unlink()
    seen = {n for _ in range(12) for n in numbers(next(loader))}
    assert seen == set(range(1, 13)) - {4}


@pytest.mark.parametrize(
    ("ranks", "new", "workers"),
    [
        (3, 2, 0),
        pytest.param(1, 4, 0, marks=pytest.mark.slow),
        # Each of these starts a dozen data workers or more, which takes half a minute.
        pytest.param(2, 3, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_another_number_of_ranks_goes_on_with_the_same_packs(
    ranks: int, new: int, workers: int, make: Callable[..., Loader], data: Path
) -> None:
    """The order stays the same through several buffers, and after another change."""
    options: dict[str, Any] = {"num_workers": workers, "checkpoint_every_seconds": 0.05}

    def several(count: int) -> list[Loader]:
        return [make(data, rank, ranks=count, **options) for rank in range(count)]

    def resumed(loaders: list[Loader], count: int) -> list[Loader]:
        states = redistribute([loader.state_dict() for loader in loaders], count)
        others = several(count)
        for loader, state in zip(others, states, strict=True):
            loader.load_state_dict(state)
        return others

    def take(count: int, loaders: list[Loader]) -> None:
        for _ in range(count):
            packs.extend(numbers(next(loader)) for loader in loaders)

    packs = expected = []
    take(2 * new + 4 * new // ranks + 5, several(ranks))
    packs = []
    first = several(ranks)
    take(2 * new, first)
    second = resumed(first, new)
    take(4, second)
    take(4, resumed(resumed(second, ranks), ranks))
    assert len(packs) > 10
    assert packs == expected[: len(packs)]


def test_states_of_another_kind_are_refused(make: Callable[..., Loader], data: Path) -> None:
    states = [make(data, rank).state_dict() for rank in range(RANKS)]
    plain = replace(CONFIG, balance=False)
    with pytest.raises(BadInput, match=r"with --balance, .* without it: .* leave --no-balance out"):
        make(data, 0, plain).load_state_dict(states[0])
    with pytest.raises(BadInput, match="add --packing"):
        replace(CONFIG, packing=False)
