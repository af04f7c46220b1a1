"""Data sets that energon cannot read: it shards, shuffles, blends and resumes readers of ours.

The reader of a ``.json`` file, an array of records, as LLaVA publishes them, or one record a line,
is here; that of tables is in :mod:`tables`. An index of the records' places is written once, beside
the ``.json`` file's stand-in in the cache, so that any record can be read alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
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
from mcore_qwen3vl.files import parse_json, replacing

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
        if first not in (b"[", b"{"):
            raise BadInput(
                f"The data set {data} is empty."
                if not first
                else f"{data} is neither a JSON array nor one JSON object a line."
            )
        rows = list(_lines(file) if first == b"{" else _elements(file, data))
    if not rows:
        raise BadInput(f"The data set {data} is empty.")
    size = path.stat().st_size
    with replacing(index_of(path)) as partial:
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
        text = os.pread(self._file.fileno(), end - start, start)  # forks share a file's position
        return crude_sample(self._path, self._path.name, index, index, text)

    @cached_property
    def _file(self) -> BinaryIO:
        return self._path.open("rb")


def _first_byte(file: BinaryIO) -> bytes:
    while block := file.read(4096):
        if found := block.lstrip():
            return found[:1]
    return b""


def _lines(file: BinaryIO) -> Iterator[tuple[int, int]]:
    start = 0
    for line in file:
        if line.strip():
            yield start, start + len(line)
        start += len(line)


def _elements(file: BinaryIO, path: Path) -> Iterator[tuple[int, int]]:
    """Yield the bounds of an array's elements; as Latin-1, each byte is one character."""
    decoder = json.JSONDecoder()
    text, base, place, count, line = "", 0, 0, 0, 1  # `base` and `line`: where `text` begins
    before = "["
    while True:
        place = _skip(text, place)
        room = len(text) - place
        try:
            if not room:
                raise ValueError("the file ends within the array")
            if text[place] != before:
                if before == "," and text[place] == "]":
                    return
                raise ValueError(f"{before!r} is expected")
            start = _skip(text, place + 1)
            if before == "[" and text[start : start + 1] == "]":
                return
            _, end = decoder.raw_decode(text, start)
            if _skip(text, end) == len(text):
                raise ValueError("the file ends within the array")
        except RecursionError:
            raise BadInput(f"{path}: record {count + 1} is nested too deeply. Remove it.") from None
        except ValueError as error:
            more = file.read(max(_WINDOW, room)).decode("latin-1")
            if not more:
                line += text[: _skip(text, min(place + 1, len(text)))].count("\n")
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


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in _BLANK:
        place += 1
    return place
