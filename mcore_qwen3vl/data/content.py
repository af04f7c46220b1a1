"""Whether a data set still holds the records that it held, told from a small part of its bytes.

A data set of a hundred million records cannot be read at each start. Its content is stated by the
sizes of its files and by a digest: of all bytes of a small data set, and otherwise of blocks that
lie evenly over all of them, 16 MiB together. The comparison sees other records, another order of
the same records and a cut file. It misses a change between two blocks if all sizes stay: in 100 GB
the blocks lie 98 MB apart. Names and times of files do not count, and files that records name, such
as images, are not read.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron.energon.eyaml import load_yaml
from megatron.energon.metadataset import traverse_metadataset

from mcore_qwen3vl.data.datasets import refuse_code
from mcore_qwen3vl.data.indexes import data_files
from mcore_qwen3vl.data.readers.tables import is_table, table_files
from mcore_qwen3vl.data.records.hooks import find_hook

BLOCK = 1 << 14
"""Bytes of a block of a large data set."""
BLOCKS = 1 << 10
"""Blocks of a large data set; each ends with its file, at the latest."""


@dataclass(frozen=True)
class Content:
    """What a data set holds.

    Attributes:
        sizes: bytes of each of its files, in the order in which they are read.
        digest: of its bytes, see the module; None: unknown, as in checkpoints of earlier versions,
            which kept one size for all files.
    """

    sizes: tuple[int, ...]
    digest: str | None


def content_of(path: Path, *, split: str = "train", trust: bool = False) -> Content:
    """Return what a split of a data set holds; BadInput if it names code without `trust`."""
    files = _files_of(path, split, trust)
    sizes = tuple(file.stat().st_size for file in files)
    return Content(sizes, _digest(files, sizes, _blend_of(path)))


def digest_of_beginning(path: Path, sizes: Sequence[int]) -> str | None:
    """Return the digest that a data set had when its files had these sizes, if it has grown since.

    It has if records were appended to its last file, whose records are lines, or files come after
    the others. None: it has not, or that cannot be told.
    """
    if path.suffix in (".yaml", ".yml"):
        return None
    files = _files_of(path, "train", trust=False)
    now = [file.stat().st_size for file in files]
    count = len(sizes)
    if not sizes or now == list(sizes) or now[: count - 1] != list(sizes[:-1]) or count > len(now):
        return None
    longer = now[count - 1] - sizes[-1]
    if longer < 0 or (longer and not _ends_with_a_line(files[count - 1], sizes[-1])):
        return None
    return _digest(files[:count], sizes)


def _ends_with_a_line(file: Path, size: int) -> bool:
    """Return whether a file's records are lines, and one of them ends after `size` bytes."""
    if file.suffix not in (".jsonl", ".json"):
        return False
    with file.open("rb") as stream:
        is_array = file.suffix == ".json" and stream.read(BLOCK).lstrip()[:1] != b"{"
        stream.seek(max(size - 1, 0))
        return not is_array and b"\n" in stream.read(2)


def content_of_file(file: Path) -> Content:
    """Return what a single file holds, whatever it is; nothing, if there is none."""
    sizes = (file.stat().st_size,) if file.is_file() else ()
    return Content(sizes, _digest([file], sizes) if sizes else None)


def digest(content: str | bytes) -> str:
    """Return a hash of a text or of bytes."""
    content = content.encode() if isinstance(content, str) else content
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_of_hook(name: str) -> str | None:
    """Return the digest of the file that has a hook; None if it has none of its own."""
    with suppress(TypeError, OSError):  # a function of a compiled module
        if file := inspect.getsourcefile(inspect.unwrap(find_hook(name))):
            return digest(Path(file).read_bytes())
    return None


def _files_of(path: Path, split: str, trust: bool) -> list[Path]:
    """Return the files that are read of a split of a data set, in the order of reading."""
    if path.suffix in (".yaml", ".yml"):
        with refuse_code(unless=trust):
            leaves = list(traverse_metadataset(path.absolute(), split_part=split))
        return [file for leaf in leaves for file in _files_of(Path(str(leaf.path)), split, trust)]
    return table_files(path, split) if is_table(path) else data_files(path)


def _blend_of(path: Path) -> str:
    """Return what a metadataset says of its data sets, but for their paths; of others nothing."""
    if path.suffix not in (".yaml", ".yml"):
        return ""

    def without_paths(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_paths(v) for key, v in value.items() if key != "path"}
        return list(map(without_paths, value)) if isinstance(value, list) else value

    said = without_paths(load_yaml(path.read_bytes()))
    return json.dumps(said, sort_keys=True, default=str)


def _digest(files: Sequence[Path], sizes: Sequence[int], blend: str = "") -> str:
    """Return the digest of each file's first bytes; `sizes` says how many."""
    total, found = sum(sizes), hashlib.blake2b(digest_size=16)
    found.update((repr(list(sizes)) + blend).encode())
    if total <= BLOCK * BLOCKS:
        for file, size in zip(files, sizes, strict=True):
            with file.open("rb") as stream:
                found.update(stream.read(size))
        return found.hexdigest()
    bounds = [0, *accumulate(sizes)]
    starts = [(total - BLOCK) * number // (BLOCKS - 1) for number in range(BLOCKS)]
    with ExitStack() as opened:
        number = -1
        for start in starts:
            if (holder := bisect_right(bounds, start) - 1) != number:
                opened.close()
                number, stream = holder, opened.enter_context(files[holder].open("rb"))
            stream.seek(start - bounds[holder])
            found.update(stream.read(min(BLOCK, bounds[holder + 1] - start)))
    return found.hexdigest()
