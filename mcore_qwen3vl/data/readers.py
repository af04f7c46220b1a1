"""The files of a data set: their indexes, and access to any of their records.

Energon's indexes are made on first use, and only once even if many ranks start at the same time.
Energon needs an index beside the data. So the cache has a stand-in: links to the data set's files,
with the index beside them, which energon reads instead. Media that a record names are still looked
for beside the data itself. From the indexes come the places of records, for messages.

Files that energon cannot read have readers of ours, which it shards, shuffles, blends and resumes.
A ``.json`` file is an array of records, as LLaVA publishes them, or has one record a line. An index
of the records' places is written once, beside the file's stand-in in the cache, so that any record
can be read alone.

Tables, Parquet files and Hugging Face datasets on disk, are read by row group. A directory was
written by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``, or holds Parquet shards, as on
the hub: ``train-00000-of-00004.parquet``. pyarrow reads both; nothing is downloaded or cached.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import sqlite3
import sys
import tarfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, islice
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import yaml
from braceexpand import braceexpand
from filelock import FileLock, Timeout
from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import (
    BaseCoreDatasetFactory,
    BaseWebdatasetFactory,
    CrudeSample,
    SavableDataset,
)
from megatron.energon.flavors.jsonl.ijsonl import IJsonlIndexWriter
from megatron.energon.flavors.webdataset.config import split_name_re
from megatron.energon.flavors.webdataset.metadata import get_info_shard_files
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.sharder import Sharder
from megatron.energon.flavors.webdataset.structs import DatasetSubset, ShardInfo
from megatron.energon.source_info import SourceInfo, get_source_info
from megatron.energon.wrappers.map_dataset import MapDataset

from mcore_qwen3vl.data.config import require_data_set
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write, parse_json, require_spelled_out, write_at_once
from mcore_qwen3vl.machine import require_extra
from mcore_qwen3vl.unused.fields import Unused

_PATIENCE = 3600.0  # seconds that other ranks wait for the rank that indexes
_CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
_ORIGIN = "origin"  # name of the file, beside a stand-in, that holds the path of the data
_SUFFIXES = (".tar", ".parquet", ".arrow")
_NAMES = ("state.json", "dataset_dict.json")  # files of Hugging Face datasets on disk


def ensure_index(path: Path) -> Path:
    """Make the index of a JSON or JSONL file, or of a folder of tars, unless there is one.

    Returns:
        The path that energon reads: `path`, if it needs no index or has one beside it, as energon's
        own preparation leaves it; otherwise its stand-in: links to the data, in a cache folder that
        is named by their state, with the index beside them.

    Raises:
        BadInput: `path` does not exist, is not a data set or is empty, or the cache cannot be
            written.
    """
    if not _needs_index(path):
        return path
    if _has_index(path):
        _require_fresh_tars(path)
        _require_single_files(path, path)
        return path
    stand_in = cache_of(path) / path.absolute().name  # in another folder once the data change
    try:
        if not _has_index(stand_in):
            _make_stand_in(path.absolute(), stand_in)
            _index_once(stand_in)
        _require_single_files(path, stand_in)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise BadInput(
                f"The name of {path} has {len(os.fsencode(path.name))} bytes, and those of its "
                "index, which end with .idx.lock, would be too long. Give it a shorter name."
            ) from error
        raise BadInput(
            f"The index of {path} cannot be written in {data_cache()} ({error}). Make that "
            "writable, or name another cache with XDG_CACHE_HOME."
        ) from error
    return stand_in


def index_beside(path: Path) -> None:
    """Make an index beside the data, where energon looks for it if a metadataset names the data.

    Raises:
        BadInput: `path` does not exist, is not a data set or is empty, or a link would lead what is
            written elsewhere.
        OSError: the folder cannot be written.
    """
    if _needs_index(path):
        if not _has_index(path):
            _refuse_links_of_index(path)
            _index_once(path)
        _require_fresh_tars(path)
        _require_single_files(path, path)


def _refuse_links_of_index(path: Path) -> None:
    """Raise BadInput if a file of an index that is to be written in `path` is a link."""
    meta = path / ".nv-meta"
    inside = sorted(meta.iterdir()) if meta.is_dir() else []
    for file in (meta, *inside):
        if file.is_symlink():
            raise BadInput(
                f"{file} is a link, and the index that is written there would land in "
                f"{file.resolve()}. Remove the link."
            )


def _needs_index(path: Path) -> bool:
    """Return whether energon needs an index; raise BadInput for what is not a data set."""
    require_data_set(path)
    if is_table(path) or path.suffix in (".yaml", ".yml"):
        return False
    if path.is_dir() or path.suffix in (".jsonl", ".json"):
        return True
    raise BadInput(
        f"{path} is not a data set. Name a .jsonl, .json or .parquet file, a folder of "
        "WebDataset .tar files or Parquet shards, a Hugging Face dataset on disk, or a "
        ".yaml of these."
    )


def _has_index(path: Path) -> bool:
    if path.is_dir():
        return (path / ".nv-meta" / "dataset.yaml").exists()
    return is_json_indexed(path)


def _index_once(path: Path) -> None:
    """Make the index under a lock, so that only one of the ranks that need it makes it."""
    lock = path / ".energon.lock" if path.is_dir() else path.with_name(path.name + ".idx.lock")
    try:
        with FileLock(lock, timeout=_PATIENCE):
            if _has_index(path):  # another rank has done it meanwhile
                return
            if path.is_dir():
                _index_tars(path)
            elif path.suffix == ".json":
                write_index(path, origin(path))
            else:
                _index_jsonl(path)
    except Timeout:
        raise BadInput(
            f"Waited {_PATIENCE:.0f} s for another process to index {path}. If none is running, "
            f"remove {lock}."
        ) from None


def _index_jsonl(path: Path) -> None:
    """Write the index of a JSONL file.

    Energon's own preparation refuses a file with one broken line; here that line is a bad sample.
    """
    with path.open("rb") as lines, IJsonlIndexWriter(EPath(path)) as index:
        start = end = records = 0
        blanks = []
        for line in lines:
            end += len(line)
            if line.strip():  # blank lines belong to the sample before or after them
                index.append(start)
                start, records = end, records + 1
            else:
                blanks.append(records)
        if start == 0:
            raise BadInput(f"The data set {origin(path)} is empty.")
        index.append(end)
        # A blank line is no record, but counts as a line: the number of records before each is
        # kept, and written before the index appears, whose presence says that both are there.
        if blanks:  # `tofile` would not report a full disk
            _blanks_file(path).write_bytes(np.array(blanks, np.int64).tobytes())
        else:
            _blanks_file(path).unlink(missing_ok=True)


def _index_tars(path: Path) -> None:
    """Make energon's index of a folder of tars; raise BadInput for what it cannot index."""
    tars = sorted(str(tar.relative_to(path)) for tar in files_below(path, (".tar",)))
    if not tars:
        raise BadInput(
            f"{origin(path)} holds neither .tar nor .parquet files, nor a Hugging Face dataset "
            "(state.json, dataset_dict.json), nor an energon index (.nv-meta)."
        )
    said = io.StringIO()
    try:
        with redirect_stdout(said):  # a command's own output may be JSON
            BaseWebdatasetFactory.prepare_dataset(
                path, tars, split_parts_ratio=[("train", 1.0)], workers=min(8, len(tars))
            )
    # energon exits where a key comes twice, and asserts that every tar has samples. What lies in
    # .nv-meta under the name of its database may be none.
    except (SystemExit, AssertionError, sqlite3.Error) as error:
        raise BadInput(_flaw_of_tars(path, tars) or f"{origin(path)}: {error}") from None
    if flaw := _doubled_part(path):
        raise BadInput(flaw)
    print(said.getvalue(), end="", file=sys.stderr)
    # Written last, so that whoever sees this file finds the rest complete.
    write_at_once(path / ".nv-meta" / "dataset.yaml", _CRUDE)


def _require_single_files(path: Path, indexed: Path) -> None:
    """Raise BadInput for a sample of tars with two files of one suffix, in an index of any origin.

    Energon's own preparation and earlier versions of ours do not look for them. An index without
    is remembered in the cache, since all of it is read.
    """
    if not indexed.is_dir() or not _lists_files(indexed):
        return
    stat = (indexed / ".nv-meta" / "index.sqlite").stat()
    seen = cache_of(path) / f"single-files-{stat.st_size}-{stat.st_mtime_ns}"
    if seen.exists():
        return
    if flaw := _doubled_part(indexed):
        advice = f" Then remove {indexed / '.nv-meta'}, the index, or make it anew."
        raise BadInput(flaw + advice * (indexed == path))
    with suppress(OSError):  # it is looked for again
        seen.parent.mkdir(parents=True, exist_ok=True)
        seen.touch()


def _require_fresh_tars(path: Path) -> None:
    """Raise BadInput for a tar that was written anew after the index beside it, with other samples.

    A copy may be younger than its index as well, so that the content decides.
    """
    if not path.is_dir():
        return
    for tar in files_below(path, (".tar",)):
        index = tar.with_name(tar.name + ".idx")
        if not index.is_file() or index.stat().st_mtime_ns >= tar.stat().st_mtime_ns:
            continue
        if not _fits(np.fromfile(index, np.uint64).tolist(), tar):
            raise BadInput(
                f"{tar} was written after its index, which has other samples. Remove "
                f"{path / '.nv-meta'} and {index.name}, or make them anew with energon prepare."
            )


_LOOKED_AT = 16  # samples of a tar whose places are compared with the index


def _fits(offsets: list[int], tar: Path) -> bool:
    """Return whether samples of a tar begin where an index says, and it ends there."""
    with tar.open("rb") as file:
        for place in offsets[:-1][:: max(1, len(offsets) // _LOOKED_AT)]:
            file.seek(place)
            try:
                tarfile.TarInfo.frombuf(file.read(512), "utf-8", "surrogateescape")
            except tarfile.HeaderError:
                return False
        file.seek(offsets[-1] if offsets else 0)
        return not any(file.read(512))


def _lists_files(indexed: Path) -> bool:
    """Return whether an index of tars lists the files of samples: energon's older ones do not."""
    file = indexed / ".nv-meta" / "index.sqlite"
    if not file.is_file():
        return False
    with closing(_open_index(indexed)) as index:
        tables = index.execute("SELECT name FROM sqlite_master").fetchall()
    return {("samples",), ("sample_parts",)} <= set(tables)


def _open_index(indexed: Path) -> sqlite3.Connection:
    # The folder may be read-only.
    file = indexed / ".nv-meta" / "index.sqlite"
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)


def _doubled_part(path: Path) -> str | None:
    """Return a sentence on a sample of indexed tars that has two files of one suffix.

    Energon takes neighbours of one name for one sample, and of two files of a suffix the last.
    """
    with closing(_open_index(path)) as index:
        found = index.execute(
            "SELECT s.sample_key, p.part_name, p.tar_file_id, count(*) AS times"
            " FROM sample_parts p JOIN samples s USING (tar_file_id, sample_index)"
            " GROUP BY p.tar_file_id, p.sample_index, p.part_name HAVING times > 1 LIMIT 1"
        ).fetchone()
    if found is None:
        return None
    key, part, number, times = found
    shards = get_info_shard_files(EPath(path))
    return (
        f"{origin(path) / shards[number]}: the sample {key} has {times} files {key}.{part}, of "
        "which only the last would be read. Give each sample a name of its own."
    )


def _flaw_of_tars(path: Path, tars: Sequence[str]) -> str | None:
    """Return a sentence on why the tars of a folder cannot be indexed."""
    places: dict[str, str] = {}
    for name in tars:
        there, before = f"{origin(path) / name}", None
        try:
            with tarfile.open(path / name) as tar:
                files = [member.name for member in tar if member.isfile()]
        except (tarfile.TarError, OSError, EOFError) as error:
            return f"{there} is damaged: {error}. Write it again, or move it out of the folder."
        matches = [match for file in files if (match := split_name_re.match(file))]
        if not matches:
            return f"{there} holds no sample: move it out of the folder."
        for match in matches:
            if (key := match[1]) == before:
                continue
            if places.get(key) == there:
                return (
                    f"{there}: the files of the sample {key} lie apart, {match[0]} after those of "
                    "other samples. Write the files of a sample one after the other, as "
                    "`tar --sort=name` does."
                )
            if key in places:
                return (
                    f"{places[key]} and {there} both have a sample {key}, and each needs a name "
                    "of its own: put the files of each tar into a folder inside it."
                )
            places[key], before = there, key
    return None


def line_of(path: Path, record: int) -> int:
    """Return the line, from 1, of a record, from 0, in an indexed JSONL file."""
    return record + 1 + int(np.searchsorted(_records_before_blanks(path), record, side="right"))


def record_of(path: Path, line: int) -> int:
    """Return the record, from 0, on a JSONL file's line, from 1; raise BadInput if it is blank."""
    blanks = _records_before_blanks(path)
    # The n-th blank line, from 0, is line blanks[n] + n + 1.
    before = int(np.searchsorted(blanks + np.arange(len(blanks)) + 1, line))
    record = line - 1 - before
    if line_of(path, record) != line:
        raise BadInput(f"Line {line:,} of {origin(path)} is blank.")
    return record


def _blanks_file(path: Path) -> Path:
    return path.with_name(path.name + ".idx.blank")


def _records_before_blanks(path: Path) -> np.ndarray:
    """Return, for each blank line of a JSONL file, the number of records before it; ascending."""
    try:
        written = os.stat(_blanks_file(path)).st_mtime_ns
    except FileNotFoundError:
        return np.zeros(0, np.int64)
    return _read_blanks(_blanks_file(path), written)


@cache
def _read_blanks(file: Path, written: int) -> np.ndarray:
    """Read the file; `written`, its time, makes the cache forget one that was written again."""
    return np.fromfile(file, np.int64)


@dataclass(frozen=True)
class RecordPlace:
    """The place of a record in its file."""

    file: Path
    number: int
    """The line of a JSONL file, or the record of another file or of a folder of tars, from 1."""
    key: str | None = None
    """The key of a sample of a tar, in whose file names it is."""

    @property
    def is_line(self) -> bool:
        """Whether `number` is a line, as an editor counts them."""
        return self.file.suffix == ".jsonl"

    def __str__(self) -> str:
        if self.is_line:
            return f"{self.file}:{self.number}"
        return f"{self.file}[{self.number if self.key is None else self.key}]"


def place_of(source: SourceInfo) -> RecordPlace:
    """Return the place from which energon read a sample."""
    indexed = Path(str(source.dataset_path))
    dataset = origin(indexed)
    if dataset.suffix == ".jsonl":
        return RecordPlace(dataset, line_of(indexed, int(source.index)))
    file = dataset if source.shard_name == dataset.name else dataset / source.shard_name
    name = source.file_names[0] if file.suffix == ".tar" and source.file_names else ""
    match = split_name_re.match(name)
    return RecordPlace(file, int(source.index) + 1, match and match[1])


def number_of(sample: Any) -> int:
    """Return the number, from 0, that a sample's record has in its file."""
    return int(get_source_info(sample)[0].index)


def sample_id(sample: Any) -> str:
    """Return where a sample comes from: ``file:line`` for JSONL, else ``file[record]``."""
    # energon passes the raw tuple of a joined sample, or a list of samples, to its error handler
    inner = getattr(sample, "data", sample)
    inner = inner[0] if isinstance(inner, list | tuple) and inner else inner
    sources = get_source_info(inner)
    if not sources:
        return str(inner["__key__"] if isinstance(inner, dict) else inner)[:200]
    return str(place_of(sources[0]))


def fingerprint(path: Path) -> str:
    """Return the names, sizes and times of the files of a data set (a file or a folder) as JSON."""
    stats = [(str(file.relative_to(path.parent)), file.stat()) for file in data_files(path)]
    return json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def data_files(path: Path) -> list[Path]:
    """Return the files of a data set, without the indexes, scores and logs beside them."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in files_below(path, (*_SUFFIXES, *_NAMES)) if file.is_file())


def files_below(path: Path, ends: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of a folder, at any depth, whose names end so.

    There may be a million others, such as images: no `Path` is made of these.
    """
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names if name.endswith(ends))


_SHARD = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9})(?!\d)(.*)")
"""A shard's name, as the Hub has it: ``train-00000-of-00004.parquet``."""
_SHOWN = 10
"""Names of missing shards, and of stray files, that are shown; the others are counted."""
_LIKE_DATA = (
    *(*_SUFFIXES, ".json", ".jsonl", ".csv", ".tsv", ".tfrecord", ".lance", ".incomplete"),
    *(".zip", ".gz", ".tgz", ".zst", ".bz2", ".xz", ".7z"),
)
_MOST_LOOKED_AT = 20_000
"""Files of a folder among which those are looked for that nothing reads."""
_ABOUT = (*_NAMES, "dataset_info.json", "dataset_infos.json")  # files about the data


def unread_files(path: Path, split: str) -> list[Unused]:
    """Return the files of a folder that seem to be data and are not read, and missing shards."""
    if not path.is_dir():
        return []
    listed = None if is_table(path) else tars_of_splits(path)
    if listed is not None:
        files = [path / name for names in listed.values() for name in names]
    else:
        files = table_files(path, split) if is_table(path) else sorted(files_below(path, (".tar",)))
    if not files:
        return []
    read, where = set(files), f"the data set {path}"
    folder = files[0].parent if (path / _DICT).exists() else path
    absent = [file for file in sorted(read) if file.suffix == ".tar" and not file.exists()]
    looked_at = list(islice(_visible_files(folder), _MOST_LOOKED_AT + 1))
    stray = [
        file
        for file in looked_at[:_MOST_LOOKED_AT]
        if file.suffix.lower() in _LIKE_DATA and file not in read and file.name not in _ABOUT
        if not (file.suffix == ".parquet" and _split_in_path(file.relative_to(path)))
    ]
    unknown = []
    if len(looked_at) > _MOST_LOOKED_AT:
        why = f"it holds more than {_MOST_LOOKED_AT:,}, of which the first were looked at"
        unknown.append(Unused(where, "other files that nothing reads", why))
    if listed is not None and not _lists_files(path):
        why = "the index does not list the files of samples, so they were not looked for"
        unknown.append(Unused(where, "samples of one key that lie next to each other", why))

    def named(some: Sequence[Path], count: int, why: str) -> list[Unused]:
        names = [str(file.relative_to(path)) for file in some]
        more = [f"{count - len(names):,} more"] if count > len(names) else []
        return [Unused(where, name, why) for name in names + more]

    return [
        *named(absent[:_SHOWN], len(absent), "it is missing, and the index lists it"),
        *named(*_missing_shards(files), "it is missing"),
        *named(sorted(stray)[:_SHOWN], len(stray), "no part of it is read"),
        *unknown,
    ]


def tars_of_splits(path: Path) -> dict[str, list[str]] | None:
    """Return the names of the tars of each split that an index beside tars lists; None if none.

    The key ``exclude`` has what it names to be left out.
    """
    for name in ("split.yaml", "split.json"):
        if (file := path / ".nv-meta" / name).is_file() and _has_index(path):
            said = require_spelled_out(yaml.safe_load(file.read_text(encoding="utf-8")))
            splits = {**said["split_parts"], "exclude": said.get("exclude") or []}
            return {split: _spelled_out(names or (), file) for split, names in splits.items()}
    return None


_MOST_SHARDS = 10_000_000
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")


def _spelled_out(names: Iterable[str], file: Path) -> list[str]:
    """Return names of tars, of which one may stand for many, as ``{000..999}.tar`` does."""
    names = list(names)
    # Before `braceexpand` makes all of a range. Of 18 digits no product here is too large to make.
    ranges = ([abs(int(b[:18]) - int(a[:18])) + 1 for a, b in _RANGE.findall(n)] for n in names)
    if any(prod(sizes) > _MOST_SHARDS for sizes in ranges):
        raise BadInput(f"{file} names more than {_MOST_SHARDS:,} tars: correct its braces.")
    return [one for name in names for one in braceexpand(name)]


def _visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of the folders in it, none of them hidden, level by level."""
    folders = [folder]
    for place in folders:
        with suppress(PermissionError), os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry))
                else:
                    yield Path(entry)


def _missing_shards(files: Iterable[Path]) -> tuple[list[Path], int]:
    """Return some shards that are not there, by the numbers in the others' names, and how many."""
    found: dict[tuple[str, int, int, str], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.name):
            before, number, total, after = match.groups()
            family = str(file.parent / before), len(number), int(total), f"-of-{total}{after}"
            found.setdefault(family, set()).add(int(number))
    missing: list[Path] = []
    count = 0
    for (before, digits, total, after), numbers in found.items():
        begin = int(total in numbers and 0 not in numbers)  # some count from 1
        expected = range(begin, begin + total)
        count += total - sum(number in expected for number in numbers)
        # A name may state a total of millions: the names of all are not made.
        lacking = (number for number in expected if number not in numbers)
        shown = islice(lacking, _SHOWN - len(missing))
        missing += [Path(f"{before}{number:0{digits}}{after}") for number in shown]
    return missing, count


def data_cache() -> Path:
    """Return the folder that holds the cache folders of all data sets; it need not exist.

    It is ``$XDG_CACHE_HOME/mcore-qwen3vl/data`` (``~/.cache/mcore-qwen3vl/data``).
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches.absolute() / "mcore-qwen3vl" / "data"


def cache_of(path: Path) -> Path:
    """Return the cache folder of a data set in its present state; it need not exist.

    The folder's name is a hash of the path and of the files' sizes and times, so that all processes
    find the same one, and no process loses its index when the data change.
    """
    state = f"{path.absolute()} {fingerprint(path.absolute())}"
    return data_cache() / hashlib.sha256(state.encode()).hexdigest()[:16]


def _make_stand_in(path: Path, made: Path) -> None:
    """Make links in the cache to a file, or to all tars of a folder."""
    made.parent.mkdir(parents=True, exist_ok=True)
    # Other ranks may read it meanwhile.
    write_at_once(made.parent / _ORIGIN, str(path))
    if not path.is_dir():
        _link_once(made, path)
        return
    made.mkdir(exist_ok=True)
    for tar in files_below(path, (".tar",)):
        _link_once(made / tar.relative_to(path), tar)


@cache
def origin(path: Path) -> Path:
    """Return the data set that `path` stands for: `path` itself unless it is a stand-in."""
    if not path.is_relative_to(data_cache()):
        return path
    return Path((path.parent / _ORIGIN).read_text(encoding="utf-8"))


def _link_once(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # an earlier run or another rank made it
        place.symlink_to(target)


_WINDOW = 1 << 24  # bytes parsed at a time
_BLANK = " \t\r\n"


@cache
def _epath(dataset: Path) -> EPath:
    """Return energon's path of a data set, which takes longer to make than the rest of a sample."""
    return EPath(dataset)


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
        dataset_path=_epath(dataset), index=within, shard_name=shard, file_names=(f"{within}.json",)
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
        """Return a reader's sample with the data set's subflavors; its JSON is parsed later."""
        return CrudeSample({**raw.data[0], "__subflavors__": self.subflavors})

    def as_file_store(self) -> Any:
        raise NotImplementedError("no data set of ours asks for files of another")


def index_of(path: Path) -> Path:
    """Return the path of the index, beside `path`, which may be a stand-in.

    The index holds uint64 rows of (start, end), one a record, then the size of `path` twice.
    """
    return path.with_name(path.name + ".idx")


def is_json_indexed(path: Path) -> bool:
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
    if (path / _DICT).exists():
        names = [_entry_below(path / _DICT, name) for name in _read_list(path / _DICT, "splits")]
        chosen = [name for name in names if name in _SPLITS[split]]
        if not chosen and split == "train":
            chosen = names if len(names) == 1 else []
        if not chosen:
            raise BadInput(f"{path} has the splits {', '.join(names)}, but none for {split}.")
        return _saved_files(path / chosen[0])
    if (path / _STATE).exists():
        return _saved_files(path)
    files = sorted(files_below(path, (".parquet",)))
    named = {file: _split_in_path(file.relative_to(path)) for file in files}
    if not any(named.values()):
        return files
    chosen_files = [file for file in files if named[file] == split]
    if not chosen_files:
        raise BadInput(f"{path} has Parquet files of other splits, but none for {split}.")
    return chosen_files


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a split that Hugging Face's ``save_to_disk`` wrote."""
    file, files = folder / _STATE, []
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
