"""The reader of tables: Parquet files, and Hugging Face datasets on disk, by row group.

A directory was written by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``, or it holds
Parquet shards, as on the hub: ``train-00000-of-00004.parquet``. pyarrow reads both; nothing is
downloaded or cached.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from mcore_qwen3vl.data.readers.crude import crude_sample
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import files_below
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.machine import require_extra

_BATCH, _BATCH_BYTES = 32, 64 << 20  # most rows and bytes decoded at a time, but at least one row
# Most batches and bytes that are kept: a worker reads from a few row groups in turn. It goes back
# to earlier rows when it resumes, and among samples of one pack.
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
DICT_FILE, STATE_FILE = "dataset_dict.json", "state.json"
"""Files of Hugging Face datasets on disk: of a dictionary of splits, and of one split."""


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
        marked = any((path / name).exists() for name in (DICT_FILE, STATE_FILE))
        return marked or next(files_below(path, (".parquet",)), None) is not None
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
        self.groups = [group for file in table_files(path, split) for group in _row_groups(file)]
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
        rows = batch.slice(row % group.batch, 1)
        # A map, such as the arguments of a call, is an object of JSON; two equal keys are bad.
        (record,) = rows.to_pylist(maps_as_pydicts="strict")
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


def table_files(path: Path, split: str) -> list[Path]:
    """Return the Parquet or Arrow files of a split; raise BadInput if there is none of it."""
    if not path.is_dir():
        return [path]
    if (path / DICT_FILE).exists():
        names = [
            _entry_below(path / DICT_FILE, name) for name in _read_list(path / DICT_FILE, "splits")
        ]
        chosen = [name for name in names if name in _SPLITS[split]]
        if not chosen and split == "train":
            chosen = names if len(names) == 1 else []
        if not chosen:
            raise BadInput(f"{path} has the splits {', '.join(names)}, but none for {split}.")
        return _saved_files(path / chosen[0])
    if (path / STATE_FILE).exists():
        return _saved_files(path)
    files = sorted(files_below(path, (".parquet",)))
    named = {file: split_in_path(file.relative_to(path)) for file in files}
    if not any(named.values()):
        return files
    chosen_files = [file for file in files if named[file] == split]
    if not chosen_files:
        raise BadInput(f"{path} has Parquet files of other splits, but none for {split}.")
    return chosen_files


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a split that Hugging Face's ``save_to_disk`` wrote."""
    file, files = folder / STATE_FILE, []
    for entry in _read_list(file, "_data_files"):
        name = _entry_below(file, entry.get("filename") if isinstance(entry, Mapping) else entry)
        if not (folder / name).is_file():
            raise BadInput(f"{file} names {name}, which is no file beside it. Copy it again.")
        files.append(folder / name)
    return files


def _entry_below(file: Path, name: Any) -> str:
    """Return a name in the folder of `file`, which says it; raise BadInput if it leads out."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & {"/", "\\", "\0"}:
        raise BadInput(
            f"{file} names {name!r:.200}, which is no file or folder beside it. Save the data set "
            "again."
        )
    return name


def _read_list(file: Path, key: str) -> list[Any]:
    try:
        return list(parse_json(file.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file} cannot be read ({error!r:.200}). Save the data set again."
        ) from error


def split_in_path(file: Path) -> str | None:
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
