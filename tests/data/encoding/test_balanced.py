"""Loaders of all ranks with balanced work, over real files."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Loader, Source, load_processor, redistribute
from mcore_qwen3vl.errors import BadInput
from tests.data.conftest import WriteJsonl, chat, question

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
def make(architecture: Architecture, processor_dir: Path) -> Callable[..., Loader]:
    def one(path: Path, rank: int, config: DataConfig = CONFIG, **options: Any) -> Loader:
        return Loader(
            [Source(path)],
            architecture,
            load_processor(processor_dir),
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
    # One waits for the next buffer at most: none is half an epoch ahead of another.
    assert max(Counter(seen).values()) <= 2
    assert (skipped, dropped) == (2, 1) or (skipped, dropped) == (2, 2)
    for line in (8, 21):
        assert len([m for m in caplog.messages if f"data.jsonl:{line} skipped" in m]) == 1


def test_sizes_are_measured_once_and_again_when_something_changes(
    make: Callable[..., Loader], data: Path
) -> None:
    def files() -> list[Path]:
        return sorted(data.parent.glob("*.sizes"))

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


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_resumed_ranks_go_on_with_the_same_rows(
    stop: int, make: Callable[..., Loader], data: Path
) -> None:
    """Also where the packer has left samples for the next buffer."""
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


def test_states_of_another_layout_or_kind_are_refused(
    make: Callable[..., Loader], data: Path
) -> None:
    states = [make(data, rank).state_dict() for rank in range(RANKS)]
    with pytest.raises(BadInput, match="cannot be dealt out to 1"):
        redistribute(states, 1)
    plain = replace(CONFIG, balance=False)
    with pytest.raises(BadInput, match="saved with --balance and this run is without it"):
        make(data, 0, plain).load_state_dict(states[0])
    with pytest.raises(BadInput, match="turn packing on"):
        replace(CONFIG, packing=False)
