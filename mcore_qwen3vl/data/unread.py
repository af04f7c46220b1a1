"""Unread files of a data set's folder, and its missing shards."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from mcore_qwen3vl.data.indexes import DATA_SUFFIXES, lists_files, tars_of_splits
from mcore_qwen3vl.data.readers.tables import (
    DICT_FILE,
    STATE_FILE,
    is_table,
    split_in_path,
    table_files,
)
from mcore_qwen3vl.files import files_below
from mcore_qwen3vl.unused.fields import Unused

_SHARD = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9})(?!\d)(.*)")
"""A shard's name, as the Hub has it: ``train-00000-of-00004.parquet``."""
_SHOWN = 10
"""Names of missing shards, and of stray files, that are shown; the others are counted."""
_LIKE_DATA = (
    *(*DATA_SUFFIXES, ".json", ".jsonl", ".csv", ".tsv", ".tfrecord", ".lance", ".incomplete"),
    *(".zip", ".gz", ".tgz", ".zst", ".bz2", ".xz", ".7z"),
)
_MOST_LOOKED_AT = 20_000
"""Files of a folder among which those are looked for that nothing reads."""
# Files about the data.
_ABOUT = (STATE_FILE, DICT_FILE, "dataset_info.json", "dataset_infos.json")


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
    folder = files[0].parent if (path / DICT_FILE).exists() else path
    absent = [file for file in sorted(read) if file.suffix == ".tar" and not file.exists()]
    looked_at = list(islice(_visible_files(folder), _MOST_LOOKED_AT + 1))
    stray = [
        file
        for file in looked_at[:_MOST_LOOKED_AT]
        if file.suffix.lower() in _LIKE_DATA and file not in read and file.name not in _ABOUT
        if not (file.suffix == ".parquet" and split_in_path(file.relative_to(path)))
    ]
    unknown = []
    if len(looked_at) > _MOST_LOOKED_AT:
        why = f"it holds more than {_MOST_LOOKED_AT:,}, of which the first were looked at"
        unknown.append(Unused(where, "other files that nothing reads", why))
    if listed is not None and not lists_files(path):
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
