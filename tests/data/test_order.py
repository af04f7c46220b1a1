"""Each record is read once an epoch, and every validation reads the same, under every layout."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megatron.energon import WorkerConfig

from mcore_qwen3vl.data import DataConfig, Loader, Source, redistribute
from mcore_qwen3vl.data.config import parse_sources
from mcore_qwen3vl.data.order import Order, Stream
from mcore_qwen3vl.data.readers import tables
from mcore_qwen3vl.data.readers.tables import TableReader
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.preference import PreferenceLoss
from tests.data.conftest import WriteJsonl, question
from tests.data.loaders import MakeLoader, lines
from tests.data.writers import WRITERS
from tests.turns import slow, slow_except

COUNT = 23
PADDED = DataConfig(seq_length=256, pad_to_longest=True, micro_batch_size=2)
PACKED = DataConfig(seq_length=128, packing=True, packing_buffer=9)
BALANCED = replace(PACKED, balance=True, micro_batches=2)


@pytest.fixture
def numbered(write_jsonl: WriteJsonl) -> Path:
    return write_jsonl([question(i, image=False, words=i % 7) for i in range(COUNT)])


Ranks = Callable[..., list[Loader]]


@pytest.fixture
def ranks(make: MakeLoader) -> Ranks:
    """Return a function that makes the loaders of all ranks."""

    def several(path: Path, count: int, config: DataConfig, **options: Any) -> list[Loader]:
        own = [{"dp_rank": rank, "dp_size": count} for rank in range(count)]
        return [make(path, config=config, **one, **options) for one in own]

    return several


class Numbers:
    """So many records of a data set."""

    first = 0

    def __init__(self, count: int, runs: Any = None) -> None:
        self._count, self.runs = count, runs

    def __len__(self) -> int:
        return self._count


def taken(loaders: Sequence[Loader], rows: int) -> list[int]:
    """Return the records of the next micro-batches, in the order of steps and ranks."""
    return [line for _ in range(rows) for one in loaders for line in lines(next(one))]


def is_even(seen: Sequence[int], without: Collection[int] = ()) -> bool:
    """Return whether no record came more often than another, but for the epoch that runs."""
    often = Counter(seen)
    usable = set(range(COUNT)) - set(without)
    return set(often) <= usable and max(often.values()) - min(often[n] for n in usable) <= 1


def test_every_epoch_is_a_new_permutation_and_the_same_under_every_layout(
    ranks: Ranks, numbered: Path
) -> None:
    single = taken(ranks(numbered, 1, PADDED), 3 * COUNT)
    epochs = [single[start : start + COUNT] for start in range(0, 6 * COUNT, COUNT)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    for count in (2, 3):
        assert taken(ranks(numbered, count, PADDED), 3 * COUNT // count)[:COUNT] == epochs[0]
    assert taken(ranks(numbered, 1, PADDED, seed=1), 11) != single[:22]


@pytest.mark.slow  # data workers
def test_data_workers_change_nothing(ranks: Ranks, numbered: Path) -> None:
    for config in (PADDED, BALANCED):
        alone = taken(ranks(numbered, 2, config), 9)
        assert taken(ranks(numbered, 2, config, num_workers=2), 9) == alone


@pytest.mark.parametrize(
    ("config", "count"), [(PACKED, 1), (BALANCED, 2), *slow((BALANCED, 1), (BALANCED, 5))]
)
def test_packs_hold_no_record_again_before_all_others(
    config: DataConfig, count: int, ranks: Ranks, numbered: Path
) -> None:
    loaders = ranks(numbered, count, config)
    seen: list[int] = []
    epochs = 0
    while len(seen) < 4 * COUNT:
        for loader in loaders:
            seen += lines(next(loader))
            assert is_even(seen)
        epochs += len(seen) == (epochs + 1) * COUNT
    assert epochs >= 3


def test_packed_records_go_on_from_a_state_of_version_0_1_0_which_names_no_start() -> None:
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
    numbers: Any = [Numbers(9)]
    stream = Stream(Order(numbers, seed=3), numbers, workers, shared=False)
    stream.restore_state({"__class__": "Stream", "_taken": 4})
    assert (stream._start, stream._taken) == (0, 4)


@pytest.mark.parametrize("config", [PADDED, PACKED, BALANCED], ids=["padded", "packed", "balanced"])
def test_bad_and_over_long_records_make_no_other_come_again(
    config: DataConfig, ranks: Ranks, write_jsonl: WriteJsonl
) -> None:
    records: list[Any] = [question(i, image=False) for i in range(COUNT)]
    records[3], records[4] = "{broken", question(4, image=False, words=400)
    path = write_jsonl(records)
    (loader,) = ranks(path, 1, replace(config, max_bad_fraction=0.5))
    seen: list[int] = []
    counts = Counter[str]()
    while len(seen) < 3 * (COUNT - 2):
        batch = next(loader)
        seen += lines(batch)
        assert not seen or is_even(seen, {3, 4})
        counts += Counter(skipped=batch.counts.skipped, dropped=batch.counts.dropped)
    assert counts["skipped"] == 1
    assert counts["dropped"] >= 3


def test_a_micro_batch_without_a_usable_record_counts_for_nothing(
    ranks: Ranks, write_jsonl: WriteJsonl
) -> None:
    (loader,) = ranks(
        write_jsonl(["{broken", question(1, image=False)]),
        1,
        DataConfig(seq_length=256, shuffle=False, max_bad_fraction=0.5),
    )
    empty, full = next(loader), next(loader)
    assert (empty.is_spare, empty.names, empty.counts.skipped) == (True, (), 1)
    assert not empty.loss_weights.any()
    assert (full.is_spare, lines(full)) == (False, [1])


def test_a_bad_record_that_a_spare_batch_passes_over_is_counted_in_its_turn(
    ranks: Ranks, write_jsonl: WriteJsonl
) -> None:
    records: list[Any] = [
        {**question(i, image=False), "chosen": "This one", "rejected": "None"} for i in range(4)
    ]
    records[:2] = ["{broken", "{broken too"]
    config = DataConfig(seq_length=256, shuffle=False, max_bad_fraction=0.5)
    config = replace(config, records=PreferenceLoss.records)
    (loader,) = ranks(write_jsonl(records), 1, config)
    # The first batch stands in with the third record, and finds the second unusable on the way.
    batches = [next(loader) for _ in range(4)]
    assert [(batch.is_spare, batch.counts.skipped) for batch in batches] == [
        (True, 1), (True, 1), (False, 0), (False, 0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "rows"),
    [*slow((2, 1, 2)), (1, 3, 2), *slow((2, 2, 1))],
    ids=["fewer", "more", "other rows"],
)
def test_a_run_goes_on_at_its_place_with_other_ranks_and_rows(
    old: int, new: int, rows: int, ranks: Ranks, numbered: Path
) -> None:
    expected = taken(ranks(numbered, 1, PADDED), 3 * COUNT)
    loaders = ranks(numbered, old, PADDED)
    seen = taken(loaders, 4)
    states = redistribute([loader.state_dict() for loader in loaders], new)
    others = ranks(numbered, new, replace(PADDED, micro_batch_size=rows))
    for loader, state in zip(others, states, strict=True):
        loader.load_state_dict(state)
    seen += taken(others, 6)
    assert seen == expected[: len(seen)]


def test_epochs_of_a_mixture_say_how_often_each_record_comes(
    make: MakeLoader, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    for name, count in (("a", 4), ("b", 6), ("c", 8)):
        write_jsonl([question(i, image=False) for i in range(count)], f"{name}.jsonl")
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(
        "datasets:\n- {path: a.jsonl, epochs: 2}\n- {path: b.jsonl, epochs: 1}\n"
        "- {path: c.jsonl, epochs: 0.5}\n"
    )
    loader = make(*parse_sources([str(mixture)]), config=replace(PADDED, micro_batch_size=1))

    def epoch() -> Counter[str]:
        return Counter(Path(next(loader).names[0]).name for _ in range(18))

    first, second = epoch(), epoch()
    for found in (first, second):
        assert [found[f"a.jsonl:{line}"] for line in range(1, 5)] == [2] * 4
        assert [found[f"b.jsonl:{line}"] for line in range(1, 7)] == [1] * 6
    assert sorted((first + second)[f"c.jsonl:{line}"] for line in range(1, 9)) == [1] * 8


@pytest.mark.parametrize("config", [PADDED, BALANCED], ids=["padded", "balanced"])
def test_a_number_of_epochs_ends_with_batches_that_count_for_nothing(
    config: DataConfig, ranks: Ranks, numbered: Path
) -> None:
    loaders = ranks(numbered, 2, config, epochs=2)
    length = loaders[0].count_remaining(None)
    assert length is not None
    rows = -(-length // (2 * config.micro_batch_size))
    seen = taken(loaders, rows)
    assert Counter(seen) == dict.fromkeys(range(COUNT), 2)
    assert len({loader.count_remaining(None) for loader in loaders}) == 1
    assert all(next(loader).is_spare for loader in loaders)
    without = ranks(numbered, 2, config)
    assert len(taken(without, rows - 1)) < 2 * COUNT  # no step of the run was empty


@pytest.mark.parametrize("config", [PADDED, BALANCED], ids=["padded", "balanced"])
@pytest.mark.parametrize(
    ("before", "after", "left_over"),
    [(1, 1, 2), *slow((1, 1, 0), (1, 1, -1), (1, 1, -3), (2, 1, 2), (1, 2, 1), (2, 2, -2))],
    ids=lambda value: str(value),
)
def test_more_epochs_go_on_where_the_last_one_ended(
    config: DataConfig, before: int, after: int, left_over: int, ranks: Ranks, numbered: Path
) -> None:
    """The last step of a run may end with nothing; the run may also stop before or after that."""
    loaders = ranks(numbered, before, config, epochs=1)
    length = loaders[0].count_remaining(None)
    assert length is not None
    per_batch = before * config.micro_batch_size
    seen = taken(loaders, -(-length // per_batch) + left_over)
    states = [loader.state_dict() for loader in loaders]
    others = ranks(numbered, after, config, epochs=3)
    for loader, state in zip(others, redistribute(states, after), strict=True):
        loader.load_state_dict(state)
    remaining = others[0].count_remaining(states[0])
    assert remaining is not None
    batches = -(-remaining // (after * config.micro_batch_size))
    seen += taken(others, batches)
    assert Counter(seen) == dict.fromkeys(range(COUNT), 3)
    assert all(next(loader).is_spare for loader in others)
    # Once more: the state of a run that went on.
    states = [loader.state_dict() for loader in others]
    last = ranks(numbered, after, config, epochs=4)
    for loader, state in zip(last, states, strict=True):
        loader.load_state_dict(state)
    remaining = last[0].count_remaining(states[0])
    assert remaining is not None
    again = taken(last, -(-remaining // (after * config.micro_batch_size)))
    assert Counter(again) == dict.fromkeys(range(COUNT), 1)


def test_a_number_of_epochs_is_refused_where_it_is_not_known(
    ranks: Ranks, numbered: Path, make: MakeLoader, media: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="--packing needs --balance"):
        ranks(numbered, 1, PACKED, epochs=1)
    sources = [Source(numbered, 0.3), Source(numbered, 0.7)]
    with pytest.raises(BadInput, match=r"data sets that have weights.*mixture file with epochs"):
        make(*sources, config=PADDED, epochs=1)
    with pytest.raises(BadInput, match=r"shard by shard.*--train-iters N"):
        make(WRITERS["tars"](tmp_path, media), config=PADDED, epochs=1)


@pytest.mark.parametrize(
    "name", slow_except(["jsonl", "array", "parquet_of_bytes", "saved", "tars"], "jsonl")
)
def test_every_validation_reads_the_same_in_order(
    name: str, ranks: Ranks, media: Path, tmp_path: Path
) -> None:
    if not (tmp_path / "media").exists():
        (tmp_path / "media").symlink_to(media)
    path = WRITERS[name](tmp_path, media)

    def validations(count: int, batches: int) -> list[list[str]]:
        loaders = ranks(path, count, PADDED, split="val", batches=batches)
        return [
            [name for _ in range(batches) for one in loaders for name in next(one).names]
            for _ in range(2)
        ]

    complete = validations(1, 40)
    assert len(set(complete[0])) == len(complete[0])
    assert complete == [complete[0]] * 2
    assert validations(4, 10) == complete
    assert validations(2, 3) == [complete[0][:12]] * 2


def test_a_large_table_is_permuted_among_parts_that_are_read_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other order would decode a part for each of its rows."""
    monkeypatch.setattr(tables, "_SMALL", 0)
    monkeypatch.setattr(tables, "_BATCH", 4)
    rows = [{"text": f"{i}"} for i in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=40)
    reader = TableReader(tmp_path / "a.parquet")

    order = Order([Numbers(len(reader), reader.runs)], seed=0)  # type: ignore[list-item]
    epochs = [[order[e * 600 + i][1] for i in range(600)] for e in range(2)]
    assert all(sorted(epoch) == list(range(600)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    decoded: list[int] = []
    decode = TableReader._decode_batches

    def counted(self: TableReader, group: tables.RowGroup) -> Any:
        decoded.append(1)
        return decode(self, group)

    monkeypatch.setattr(TableReader, "_decode_batches", counted)
    for number in epochs[0]:
        assert reader[number]["json"]["text"] == str(number)
    assert len(decoded) <= 2 * len(reader.groups)
    steps = np.array([abs(a - b) for a, b in pairwise(epochs[0])])
    assert np.median(steps) > 40  # neighbours are of different parts


def test_going_back_in_a_blend_by_weights_draws_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run reads its packing buffer in the order of the packs."""
    order = Order([Numbers(7), Numbers(9)], weights=[1, 3], seed=0)  # type: ignore[list-item]
    straight = [order[place] for place in range(30_000)]
    drawn: list[int] = []
    draw = Order._random_state

    def counted(self: Order, *which: int) -> Any:
        drawn.append(len(which))
        return draw(self, *which)

    monkeypatch.setattr(Order, "_random_state", counted)
    for place in (29_999, 9_999, 10_000, 0, 20_000):
        drawn.clear()
        assert order[place] == straight[place]
        assert drawn.count(1) <= 1  # the others are permutations


@pytest.mark.parametrize(("counts", "most"), [([100_000], 5), ([50_000, 50_000], 13)])
def test_an_order_takes_few_bytes_a_record(counts: list[int], most: int) -> None:
    """Each data worker of each rank has one."""
    order = Order([Numbers(count) for count in counts], seed=0)  # type: ignore[misc]
    tracemalloc.start()
    try:
        assert all(order[place] for place in range(100))  # of all data sets
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < most * sum(counts)
