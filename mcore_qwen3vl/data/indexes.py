"""The indexes of a data set's files, and the cache where they lie.

Energon's indexes are made on first use, and only once even if many ranks start at the same time.
Energon needs an index beside the data. So the cache has a stand-in: links to the data set's files,
with the index beside them, which energon reads instead. Media that a record names are still looked
for beside the data itself.
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
from collections.abc import Iterable, Sequence
from contextlib import closing, redirect_stdout, suppress
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import yaml
from braceexpand import braceexpand
from filelock import FileLock, Timeout
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.flavors.jsonl.ijsonl import IJsonlIndexWriter
from megatron.energon.flavors.webdataset.config import split_name_re
from megatron.energon.flavors.webdataset.metadata import get_info_shard_files

from mcore_qwen3vl.data.config import require_data_set
from mcore_qwen3vl.data.readers.json_arrays import is_json_indexed, write_index
from mcore_qwen3vl.data.readers.tables import DICT_FILE, STATE_FILE, is_table
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import files_below, write_at_once
from mcore_qwen3vl.json_and_yaml import require_spelled_out

_PATIENCE = 3600.0  # seconds that other ranks wait for the indexing rank
_CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
_ORIGIN = "origin"  # name of the file, beside a stand-in, that holds the path of the data
DATA_SUFFIXES = (".tar", ".parquet", ".arrow")


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
    if not indexed.is_dir() or not lists_files(indexed):
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


def lists_files(indexed: Path) -> bool:
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


def fingerprint(path: Path) -> str:
    """Return the names, sizes and times of the files of a data set (a file or a folder) as JSON."""
    stats = [(str(file.relative_to(path.parent)), file.stat()) for file in data_files(path)]
    return json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def data_files(path: Path) -> list[Path]:
    """Return the files of a data set, without the indexes, scores and logs beside them."""
    if not path.is_dir():
        return [path]
    found = files_below(path, (*DATA_SUFFIXES, STATE_FILE, DICT_FILE))
    return sorted(file for file in found if file.is_file())


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
    """Return all names of tars; a given name may stand for many, as ``{000..999}.tar`` does."""
    names = list(names)
    # Before `braceexpand` makes all of a range. Of 18 digits no product here is too large to make.
    ranges = ([abs(int(b[:18]) - int(a[:18])) + 1 for a, b in _RANGE.findall(n)] for n in names)
    if any(prod(sizes) > _MOST_SHARDS for sizes in ranges):
        raise BadInput(f"{file} names more than {_MOST_SHARDS:,} tars: correct its braces.")
    return [one for name in names for one in braceexpand(name)]


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
