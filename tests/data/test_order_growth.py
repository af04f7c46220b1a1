"""Records that are appended to a data set come from the next epoch on; the running one stays."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_qwen3vl.data import DataConfig, Loader, Source, redistribute
from mcore_qwen3vl.data.order import Extent, Order
from mcore_qwen3vl.errors import BadInput
from tests.data.conftest import question
from tests.data.loaders import MakeLoader
from tests.data.test_order import Numbers
from tests.turns import slow

PADDED = DataConfig(seq_length=256, pad_to_longest=True, micro_batch_size=2)
PACKED = DataConfig(seq_length=128, packing=True, packing_buffer=5)
BALANCED = replace(PACKED, balance=True, micro_batches=2)
FIRST, MORE = 13, 4
"""Records of a data set when a run begins, and those that are appended."""


def jsonl(folder: Path, first: int, count: int) -> None:
    """Append questions, which say their numbers, to a file."""
    with (folder / "a.jsonl").open("a") as file:
        for number in range(first, first + count):
            print(json.dumps(question(number, image=False, words=number % 7)), file=file)


def shards(folder: Path, first: int, count: int) -> None:
    """Add a shard of Parquet."""
    rows = [question(n, image=False, words=n % 7) for n in range(first, first + count)]
    (folder / "shards").mkdir(exist_ok=True)
    table = pa.Table.from_pylist([{"messages": row["messages"]} for row in rows])
    pq.write_table(table, folder / "shards" / f"train-{first:03}.parquet", row_group_size=3)


PLACES = {jsonl: "a.jsonl", shards: "shards"}


def number_in(name: str) -> int:
    """Return the number of a record, from 0, of a file or of a shard named by its first one."""
    place, _, number = name.rstrip("]").replace("[", ":").rpartition(":")
    return int(number) - 1 + (int(Path(place).stem[-3:]) if place.endswith("parquet") else 0)


def taken(loaders: Sequence[Loader], batches: int) -> list[int]:
    return [number_in(name) for _ in range(batches) for one in loaders for name in next(one).names]


@pytest.mark.parametrize("write", [jsonl, shards])
@pytest.mark.parametrize(
    ("config", "ranks", "workers", "batches"),
    [
        (PADDED, (1, 1), (0, 0), 3),
        (BALANCED, (1, 1), (0, 0), 3),
        (BALANCED, (1, 1), (0, 0), 12),
        *slow(
            (PADDED, (1, 1), (0, 0), 0),
            (PADDED, (1, 1), (2, 1), 7),
            (PADDED, (1, 2), (0, 0), 8),
            (PADDED, (2, 1), (0, 0), 5),
            (BALANCED, (1, 1), (0, 0), 0),
            *((BALANCED, (2, 1), (0, 0), batches) for batches in range(1, 8)),
            *((BALANCED, (1, 2), (2, 2), batches) for batches in range(1, 12, 2)),
            *((BALANCED, (2, 2), (2, 2), batches) for batches in range(1, 8)),
        ),
    ],
)
def test_what_is_appended_comes_from_the_next_epoch_on(
    write: Callable[[Path, int, int], None],
    config: DataConfig,
    ranks: tuple[int, int],
    workers: tuple[int, int],
    batches: int,
    make: MakeLoader,
    tmp_path: Path,
) -> None:
    epochs = 4

    def loaders(count: int, workers: int, epochs: int) -> list[Loader]:
        path = tmp_path / PLACES[write]
        own = [{"dp_rank": r, "dp_size": count, "num_workers": workers} for r in range(count)]
        return [make(path, config=config, epochs=epochs, **one) for one in own]

    write(tmp_path, 0, FIRST)
    before = loaders(ranks[0], workers[0], 2)
    seen = taken(before, batches)
    states = [one.state_dict() for one in before]
    running = max(len(seen) - 1, 0) // FIRST  # the epoch that has begun
    write(tmp_path, FIRST, MORE)
    after = loaders(ranks[1], workers[1], epochs)
    remaining = after[0].count_remaining(states[0])
    for one, state in zip(after, redistribute(states, ranks[1]), strict=True):
        one.load_state_dict(state)
    assert remaining is not None
    rows = ranks[1] * config.micro_batch_size
    seen += taken(after, -(-remaining // rows))
    often = dict.fromkeys(range(FIRST), epochs)
    often |= dict.fromkeys(range(FIRST, FIRST + MORE), epochs - (running + 1 if batches else 0))
    assert Counter(seen) == often
    assert all(next(one).is_spare for one in after)


def test_data_sets_grow_twice_and_without_a_word_of_epochs(
    make: MakeLoader, tmp_path: Path
) -> None:
    """Twice in one epoch, of which the second counts, and once more in another."""
    jsonl(tmp_path, 0, FIRST)
    path, held, seen = tmp_path / "a.jsonl", FIRST, []
    loader = make(path, config=replace(PADDED, micro_batch_size=1))
    for batches in (3, 3, 7, 10):
        seen += taken([loader], batches)
        jsonl(tmp_path, held, 2)
        held += 2
        state, loader = loader.state_dict(), make(path, config=replace(PADDED, micro_batch_size=1))
        loader.load_state_dict(state)
    # An epoch of 13; after it two were appended twice, and twice more at its end.
    seen += taken([loader], 19 - 10 + 21)
    passes = [seen[:13], seen[13:32], seen[32:53]]
    assert [sorted(one) for one in passes] == [list(range(n)) for n in (13, 19, 21)]


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("runs", [None, [(4, 2)] * 5])
def test_the_running_epoch_keeps_its_order(seed: int | None, runs: list[tuple[int, int]]) -> None:
    old = Order([Numbers(12, runs and runs[:3])], seed=seed)  # type: ignore[list-item]
    new = Order([Numbers(20, runs)], seed=seed)  # type: ignore[list-item]
    assert new.restore(old.history)
    assert new.grow(13) == 24
    assert [new[place] for place in range(24)] == [old[place] for place in range(24)]
    assert sorted(new[place][1] for place in range(24, 44)) == list(range(20))
    again = Order([Numbers(20, runs)], seed=seed)  # type: ignore[list-item]
    assert not again.restore(new.history)
    assert [again[place] for place in range(60)] == [new[place] for place in range(60)]


@pytest.mark.parametrize("position", [0, 1, 29, 30, 41])
def test_data_sets_of_a_mixture_grow_at_its_epoch(position: int) -> None:
    """Its epoch reads the first twice and the second once; the second has grown."""

    def order(second: int) -> Order:
        return Order([Numbers(10), Numbers(second)], repeats=[2, 1], seed=0)  # type: ignore[list-item]

    old, new = order(10), order(14)
    assert new.restore(old.history)
    start = new.grow(position)
    assert start == -(-position // 30) * 30
    assert [new[place] for place in range(start)] == [old[place] for place in range(start)]
    epoch = Counter(new[place] for place in range(start, start + 34))
    assert epoch == {**{(0, n): 2 for n in range(10)}, **{(1, n): 1 for n in range(14)}}


@pytest.mark.parametrize("position", [0, 3, 25, 10_007])
def test_a_data_set_with_a_weight_grows_after_its_own_pass(position: int) -> None:
    def order(first: int) -> Order:
        return Order([Numbers(first), Numbers(9)], weights=[1, 3], seed=0)  # type: ignore[list-item]

    old, new = order(7), order(11)
    assert new.restore(old.history)
    assert new.grow(position) == position
    assert [new[place][0] for place in range(20_100)] == [old[p][0] for p in range(20_100)]
    drawn = [n for part, n in (new[place] for place in range(20_100)) if part == 0]
    before = sum(old[place][0] == 0 for place in range(position))
    whole = -(-before // 7) * 7
    assert set(Counter(drawn[:whole]).values()) <= {whole // 7}
    assert set(drawn[:whole]) <= set(range(7))
    assert sorted(drawn[whole : whole + 11]) == list(range(11))
    second = [n for part, n in (new[place] for place in range(20_100)) if part == 1]
    assert second == [n for part, n in (old[place] for place in range(20_100)) if part == 1]


def test_a_data_set_that_has_less_is_refused(make: MakeLoader, tmp_path: Path) -> None:
    jsonl(tmp_path, 0, FIRST)
    state = make(tmp_path / "a.jsonl", config=PADDED).state_dict()
    (tmp_path / "a.jsonl").unlink()
    jsonl(tmp_path, 0, FIRST - 1)
    with pytest.raises(BadInput, match="has 12 records and had 13"):
        make(tmp_path / "a.jsonl", config=PADDED).load_state_dict(state)


@pytest.mark.parametrize("config", [PACKED, BALANCED], ids=["own packs", "weights"])
def test_packs_without_common_epochs_are_refused(
    config: DataConfig, make: MakeLoader, tmp_path: Path
) -> None:
    jsonl(tmp_path, 0, FIRST)
    path = tmp_path / "a.jsonl"
    sources = [Source(path, 0.5), Source(path, 0.5)] if config.balance else [Source(path)]
    state = make(*sources, config=config).state_dict()
    jsonl(tmp_path, FIRST, MORE)
    with pytest.raises(BadInput, match="has more records"):
        make(*sources, config=config).load_state_dict(state)


def test_an_extent_is_plain_data() -> None:
    order = Order([Numbers(3), Numbers(8, [(4, 2)] * 2)], seed=0)  # type: ignore[list-item]
    assert order.history == [[0, [[3, 0], [8, 2]]]]
    assert order.extents == [Extent(3), Extent(8, 2)]
