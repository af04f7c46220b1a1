"""Data sets that energon cannot read: it shards, shuffles, blends and resumes readers of ours.

A ``.json`` file is an array of records, as LLaVA publishes them, or has one record a line. An index
of the records' places is written once, beside the file's stand-in in the cache, so that any record
can be read alone.

Tables, Parquet files and Hugging Face datasets on disk, are read by row group. A directory was
written by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``, or holds Parquet shards, as on
the hub: ``train-00000-of-00004.parquet``. pyarrow reads both; nothing is downloaded or cached.
"""

from __future__ import annotations

import json
import os
import re
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseCoreDatasetFactory, CrudeSample, SavableDataset
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.sharder import Sharder
from megatron.energon.flavors.webdataset.structs import DatasetSubset, ShardInfo
from megatron.energon.source_info import SourceInfo
from megatron.energon.wrappers.map_dataset import MapDataset

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write, parse_json
from mcore_qwen3vl.machine import require_extra

_WINDOW = 1 << 24  # bytes parsed at a time
_BLANK = " \t\r\n"


def crude_sample(
    dataset: Path, shard: str, index: int, within: int, record: bytes | Mapping[str, Any] = b""
) -> dict[str, Any]:
    """Make a sample in the form of energon's readers.

    Args:
        index: the sample's number in the data set, by which energon finds it again.
        within: the sample's number in the file, for messages.
        record: the record as JSON text, or parsed; empty if it is not read yet.
    """
    source = SourceInfo(
        dataset_path=EPath(dataset), index=within, shard_name=shard, file_names=(f"{within}.json",)
    )
    return {
        "__key__": str(index),
        "__shard__": shard,
        "__restore_key__": ("Webdataset", index),
        "__sources__": (source,),
        "json": record,
    }


@dataclass(eq=False)
class CrudeFactory(BaseCoreDatasetFactory[CrudeSample], Sharder):
    """Energon's factory over a reader; its options are those of energon's own factories."""

    __sample_type__ = CrudeSample

    path: Path
    reader: Any  # a sequence of crude samples; `counts` has those of each part to read together
    training: bool  # whether to shuffle, and to start again at the end
    worker_config: WorkerConfig
    subflavors: dict[str, Any]
    shuffle_over_epochs: int | None = 1  # None: do not shuffle
    parallel_shard_iters: int = 16  # parts that a worker reads from in turn
    max_samples_per_sequence: int | None = None  # of the pieces that parts are cut into to shuffle
    subset: DatasetSubset | None = None

    def __len__(self) -> int:
        if self.subset is None:
            return len(self.reader)
        start, end = self.subset.compute_subset(len(self.reader))
        return end - start

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset[CrudeSample]:
        """Build this rank's data set."""
        shards = [
            ShardInfo(name=f"{self.path.name}-{index}", path=EPath(self.path), count=count)
            for index, count in enumerate(self.reader.counts)
        ]
        offsets = self.shard_workers(
            shards,
            worker_config=self.worker_config,
            max_samples_per_sequence=self.max_samples_per_sequence,
            rotation_offset=worker_rotation_offset,
            subset=self.subset,
        )
        samples = WebdatasetSampleLoaderDataset(
            join_readers=[self.reader],
            workers_sample_slice_offsets=offsets,
            worker_config=self.worker_config,
            shuffle_over_epochs=self.shuffle_over_epochs if self.training else None,
            parallel_slice_iters=self.parallel_shard_iters if self.training else 1,
        )
        return MapDataset(
            samples, self.load_raw, stateless_map_fn=True, worker_config=self.worker_config
        )

    def load_raw(self, raw: Any) -> CrudeSample:
        """Return a reader's sample with its JSON parsed and with the data set's subflavors."""
        sample = raw.data[0]
        record = sample["json"]
        if isinstance(record, bytes):
            record = parse_json(record)
        return CrudeSample({**sample, "json": record, "__subflavors__": self.subflavors})

    def as_file_store(self) -> Any:
        raise NotImplementedError("no data set of ours asks for files of another")


def index_of(path: Path) -> Path:
    """Return the path of the index, beside `path`, which may be a stand-in.

    The index holds uint64 rows of (start, end), one a record, then the size of `path` twice.
    """
    return path.with_name(path.name + ".idx")


def is_indexed(path: Path) -> bool:
    """Return whether the index exists and is up to date with the file.

    Energon's index of a JSONL file may be asked for too: its last number is that file's size.
    """
    index = index_of(path)
    if not index.exists() or index.stat().st_mtime_ns < path.stat().st_mtime_ns:
        return False
    with index.open("rb") as stream:
        stream.seek(-8, os.SEEK_END)
        return int.from_bytes(stream.read(8), sys.byteorder) == path.stat().st_size


def write_index(path: Path, data: Path) -> None:
    """Write the index of a ``.json`` file, which stands for `data`.

    Raises:
        BadInput: the file is empty, or is neither an array nor one object a line.
        OSError: the folder cannot be written.
    """
    with path.open("rb") as file:
        first = _first_byte(file)
        file.seek(0)
        if first not in (b"", b"[", b"{"):
            raise BadInput(f"{data} is neither a JSON array nor one JSON object a line.")
        rows = list(_element_bounds(file, data) if first == b"[" else _line_bounds(file))
    if not rows:
        raise BadInput(f"The data set {data} is empty.")
    size = path.stat().st_size
    with atomic_write(index_of(path), remedy=None) as partial:
        # `tofile` would not report a full disk.
        partial.write_bytes(np.array([*rows, (size, size)], np.uint64).tobytes())


class JsonReader:
    """Random access to the records of a ``.json`` file, in the form of energon's readers."""

    def __init__(self, path: Path, index: Path) -> None:
        self._path = path
        self._rows = np.memmap(index, np.uint64, "r").reshape(-1, 2)[:-1]
        self.counts = [len(self._rows)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        """Return the crude sample of one record, with its JSON not parsed yet."""
        start, end = (int(bound) for bound in self._rows[index])
        # pread, because forks share a file's position.
        text = os.pread(self._open_file.fileno(), end - start, start)
        return crude_sample(self._path, self._path.name, index, index, text)

    @cached_property
    def _open_file(self) -> BinaryIO:
        return self._path.open("rb")


def _first_byte(file: BinaryIO) -> bytes:
    while block := file.read(4096):
        if text := block.lstrip():
            return text[:1]
    return b""


def _line_bounds(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the lines that are not blank."""
    start = 0
    for line in file:
        if line.strip():
            yield start, start + len(line)
        start += len(line)


def _element_bounds(file: BinaryIO, path: Path) -> Iterator[tuple[int, int]]:
    """Yield the bounds of an array's elements; as Latin-1, each byte is one character."""
    decoder = json.JSONDecoder()
    text, base, place, count, line = "", 0, 0, 0, 1  # `base` and `line`: where `text` begins
    before = "["
    while True:
        place = _skip_blanks(text, place)
        room = len(text) - place
        try:
            if not room:
                raise ValueError("the file ends within the array")
            if text[place] != before:
                if before == "," and text[place] == "]":
                    return
                raise ValueError(f"{before!r} is expected")
            start = _skip_blanks(text, place + 1)
            if before == "[" and text[start : start + 1] == "]":
                return
            _, end = decoder.raw_decode(text, start)
            # What ends where the text does may go on in the file, as a number does.
            if _skip_blanks(text, end) == len(text):
                raise ValueError("the file ends within the array")
        except RecursionError:
            raise BadInput(f"{path}: record {count + 1} is nested too deeply. Remove it.") from None
        except ValueError as error:
            # At least as much again, so that a large record is parsed only a few times.
            more = file.read(max(_WINDOW, room)).decode("latin-1")
            if not more:
                line += text[: _skip_blanks(text, min(place + 1, len(text)))].count("\n")
                reason = getattr(error, "msg", error)
                raise BadInput(
                    f"{path} is not a valid JSON array: record {count + 1}, from line {line}: "
                    f"{reason}. Write the file again, or write one record a line (.jsonl), "
                    "where a broken record is skipped."
                ) from error
            line += text[:place].count("\n")
            text, base, place = text[place:] + more, base + place, 0
            continue
        yield base + start, base + end
        place, before, count = end, ",", count + 1


def _skip_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place] in _BLANK:
        place += 1
    return place


_BATCH, _BATCH_BYTES = 32, 64 << 20  # most rows and bytes decoded at a time, but at least one row
# Most batches and bytes that are kept: a worker reads from a few row groups in turn, and goes back
# to earlier rows when it resumes, and among samples that are packed together.
_KEPT, _KEPT_BYTES = 16, 512 << 20
_SMALL = 64 << 20  # a table of no more bytes is kept, and its rows are read in any order
# A row group is refused as a bomb if, unpacked, it is larger than both: this many bytes, and this
# many times its size in the file. Text is usually compressed 3 to 20 times, images not at all.
_BOMB_BYTES, _BOMB_RATIO = 64 << 20, 100
_SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev"),
    "test": ("test", "testing"),
}
_DICT, _STATE = "dataset_dict.json", "state.json"


@dataclass(frozen=True)
class RowGroup:
    """Consecutive rows that are best read together."""

    file: Path
    number: int | None  # its number in a Parquet file; None: the whole of an Arrow file
    rows: int
    first: int  # number of its first row in the file
    bytes: int = 0  # size of all its rows, decoded; 0 if the file is memory-mapped

    @property
    def batch(self) -> int:
        """The number of rows that are decoded at a time."""
        fitting = _BATCH_BYTES * self.rows // max(self.bytes, 1)
        return max(1, min(_BATCH, fitting))


def is_table(path: Path) -> bool:
    """Return whether `path` is a Parquet file or a Hugging Face dataset on disk."""
    if path.is_dir():
        marked = any((path / name).exists() for name in (_DICT, _STATE))
        return marked or next(path.rglob("*.parquet"), None) is not None
    return path.suffix == ".parquet"


class TableReader:
    """Random access to rows as records: columns are keys, and nulls are left out."""

    def __init__(self, path: Path, split: str = "train") -> None:
        """Open the files and read their row groups' sizes.

        Args:
            split: ``train``, ``val`` or ``test`` of a directory that has several.

        Raises:
            BadInput: pyarrow is missing, a file is not a table, or there are no rows.
        """
        require_extra("pyarrow", str(path))
        self.path = path
        self.groups = [group for file in _table_files(path, split) for group in _row_groups(file)]
        self.counts = [group.rows for group in self.groups]
        self._bounds = [0, *accumulate(self.counts)]
        decoded = sum(group.bytes for group in self.groups)
        self.runs = (
            [(group.rows, 2 * group.batch) for group in self.groups] if decoded > _SMALL else None
        )
        """For each part of a large table: its rows, and how many of them are kept once decoded.
        None: any row can be read at any time."""
        self._kept = _KEPT if self.runs else self._bounds[-1]
        if self._bounds[-1] == 0:
            raise BadInput(f"The data set {path} is empty.")
        self._batches: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self.buffered_bytes = 0  # of these batches
        self._tables: dict[Path, Any] = {}  # the Arrow files
        self._parquet_files: dict[Path, Any] = {}
        self._open: dict[int, tuple[int, Iterator[Any]]] = {}  # group: (next batch, the rest)

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, index: int) -> Any:
        """Return the crude sample of one row."""
        place = bisect_right(self._bounds, index) - 1
        group, row = self.groups[place], index - self._bounds[place]
        batch = self._read_batch(place, row // group.batch)
        (record,) = batch.slice(row % group.batch, 1).to_pylist()
        shard = str(group.file.relative_to(self.path)) if self.path.is_dir() else group.file.name
        return crude_sample(self.path, shard, index, group.first + row, _without_nulls(record))

    def _read_batch(self, place: int, number: int) -> Any:
        """Return a batch of one group; batches between the last one read and it are decoded too."""
        kept = self._batches.get((place, number))
        if kept is not None:
            self._batches.move_to_end((place, number))
            return kept
        group = self.groups[place]
        if group.number is None:  # memory-mapped: nothing is decoded or kept
            if group.file not in self._tables:
                self._tables[group.file] = _arrow_table(group.file)
            return self._tables[group.file].slice(number * group.batch, group.batch)
        # Batches are decoded in order: an earlier one is decoded anew from the group's first.
        upcoming, rest = self._open.pop(place, (0, iter(())))
        if upcoming == 0 or number < upcoming:
            upcoming, rest = 0, self._decode_batches(group)
        for batch in rest:
            if (place, upcoming) not in self._batches:
                self.buffered_bytes += batch.nbytes
            self._batches[place, upcoming] = batch
            upcoming += 1
            self._drop_old_batches()
            if upcoming > number:
                break
        self._open[place] = upcoming, rest
        if len(self._open) > _KEPT:
            self._open.pop(next(iter(self._open)))
        return self._batches[place, number]

    def _drop_old_batches(self) -> None:
        """Drop the least recently used batches beyond the limits, but never the last one."""
        while len(self._batches) > 1 and (
            len(self._batches) > self._kept or self.buffered_bytes > _KEPT_BYTES
        ):
            self.buffered_bytes -= self._batches.popitem(last=False)[1].nbytes

    def _decode_batches(self, group: RowGroup) -> Iterator[Any]:
        """Yield the batches of a row group from its first on."""
        import pyarrow.parquet as pq

        if group.file not in self._parquet_files:
            self._parquet_files[group.file] = pq.ParquetFile(group.file)
        file = self._parquet_files[group.file]
        batches = file.iter_batches(group.batch, row_groups=[group.number], use_threads=False)
        return _rebatch(batches, group.batch)


def _rebatch(batches: Iterator[Any], size: int) -> Iterator[Any]:
    """Yield tables of `size` rows, the last of fewer: pyarrow also splits at column chunks."""
    import pyarrow as pa

    waiting: list[Any] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        while rows >= size:
            table = pa.Table.from_batches(waiting)
            yield table.slice(0, size)
            rows -= size
            waiting = table.slice(size).to_batches() if rows else []
    if rows:
        yield pa.Table.from_batches(waiting)


def _table_files(path: Path, split: str) -> list[Path]:
    """Return the Parquet or Arrow files of a split; raise BadInput if there is none of it."""
    if not path.is_dir():
        return [path]
    if (path / _DICT).exists():
        names = _read_list(path / _DICT, "splits")
        chosen = [name for name in names if name in _SPLITS[split]]
        if not chosen and split == "train":
            chosen = names if len(names) == 1 else []
        if not chosen:
            raise BadInput(f"{path} has the splits {', '.join(names)}, but none for {split}.")
        return _table_files(path / chosen[0], split)
    if (path / _STATE).exists():
        return [path / entry["filename"] for entry in _read_list(path / _STATE, "_data_files")]
    files = sorted(path.rglob("*.parquet"))
    named = {file: _split_in_path(file.relative_to(path)) for file in files}
    if not any(named.values()):
        return files
    chosen_files = [file for file in files if named[file] == split]
    if not chosen_files:
        raise BadInput(f"{path} has Parquet files of other splits, but none for {split}.")
    return chosen_files


def _read_list(file: Path, key: str) -> list[Any]:
    try:
        return list(parse_json(file.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file} cannot be read ({error!r:.200}). Save the data set again."
        ) from error


def _split_in_path(file: Path) -> str | None:
    """Return the split that a file's path names, as on the hub.

    Such paths are ``train-00000-of-00004.parquet`` and ``validation/0.parquet``.
    """
    words = re.split(r"[^a-z]+", str(file).lower())
    return next((s for s, names in _SPLITS.items() if any(n in words for n in names)), None)


def _row_groups(file: Path) -> Iterator[RowGroup]:
    """Yield the row groups of a Parquet file, or an Arrow file as one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.suffix != ".parquet":
            yield RowGroup(file, None, _arrow_table(file).num_rows, 0)
            return
        metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{file} cannot be read as a table: {error}. Write it again.") from error
    first = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        _refuse_bomb(file, number, group)
        yield RowGroup(file, number, group.num_rows, first, group.total_byte_size)
        first += group.num_rows


def _refuse_bomb(file: Path, number: int, group: Any) -> None:
    """Raise BadInput for a row group that unpacks to far more than it has in the file."""
    stored = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
    unpacked = sum(group.column(i).total_uncompressed_size for i in range(group.num_columns))
    if unpacked > max(_BOMB_BYTES, _BOMB_RATIO * stored):
        raise BadInput(
            f"{file}: row group {number} has {stored:,} bytes, which unpack to {unpacked:,}. "
            "Refused: reading it could fill the memory. If that is meant, write the file again "
            f"with row groups of less than {_BOMB_BYTES >> 20} MiB."
        )


def _arrow_table(file: Path) -> Any:
    """Open an Arrow file by memory mapping, without reading it."""
    import pyarrow as pa

    source = pa.memory_map(str(file))
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(source).read_all()


def _without_nulls(value: Any) -> Any:
    """Return `value` without nulls, which a column has where a record lacks a key."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
