"""Whether a data set still holds the records that it held, told from a small part of its bytes.

A data set of a hundred million records cannot be read at each start. Its content is stated by the
sizes of its files and by a digest: of all bytes of a small data set, and otherwise of blocks that
lie evenly over all of them, 16 MiB together. Other records, another order of the same records and a
file that was cut are seen, but for a change between two blocks that leaves all sizes: in 100 GB the
blocks lie 98 MB apart. Names and times of files do not count, and files that records name, such as
images, are not read.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from megatron.energon.metadataset import traverse_metadataset

from mcore_qwen3vl.data.datasets import refuse_code
from mcore_qwen3vl.data.readers import data_files, is_table, table_files

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


def content_of(path: Path, *, trust: bool = False) -> Content:
    """Return what a data set holds; BadInput if it names code without `trust`."""
    files = _files_of(path, trust)
    sizes = tuple(file.stat().st_size for file in files)
    return Content(sizes, _digest(files, sizes))


def _files_of(path: Path, trust: bool) -> list[Path]:
    """Return the files that training reads of a data set, in the order of reading."""
    if path.suffix in (".yaml", ".yml"):
        with refuse_code(unless=trust):
            leaves = list(traverse_metadataset(path.absolute(), split_part="train"))
        return [path, *(file for leaf in leaves for file in _files_of(Path(str(leaf.path)), trust))]
    return table_files(path, "train") if is_table(path) else data_files(path)


def _digest(files: Sequence[Path], sizes: Sequence[int]) -> str:
    """Return the digest of the first bytes of each file, of which `sizes` says how many."""
    total, found = sum(sizes), hashlib.blake2b(digest_size=16)
    found.update(repr(list(sizes)).encode())
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
