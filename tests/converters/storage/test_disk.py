"""Files written past the page cache hold what was written."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.converters.storage import disk
from mcore_qwen3vl.converters.storage.disk import BLOCK, BUFFER_BYTES, DirectFile

SIZES = [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 100_000, BUFFER_BYTES + 5]
PWRITE = os.pwrite


@pytest.fixture(params=["direct", "not opened", "not aligned enough", "written in parts"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Simulate file systems that handle direct writes in several ways."""
    opened: list[int | None] = []

    def open_direct(path: Path, flags: int) -> int | None:
        opened.append(None if request.param == "not opened" else os.open(path, flags))
        return opened[-1]

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if descriptor in opened:
            assert offset % BLOCK == 0
            assert len(data) % BLOCK == 0
            if request.param == "not aligned enough":
                raise OSError(errno.EINVAL, "Invalid argument")
        if request.param == "written in parts":
            data = data[: max(len(data) // 3, 1)]
        return PWRITE(descriptor, data, offset)

    monkeypatch.setattr(disk, "_open_direct", open_direct)
    monkeypatch.setattr(os, "pwrite", pwrite)
    return str(request.param)


@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_any_size(tmp_path: Path, system: str, seed: int) -> None:
    rng = random.Random(seed)
    expected = bytearray()
    with DirectFile(tmp_path / "file", create=True) as out:
        for _ in range(30):
            piece = rng.randbytes(rng.choice(SIZES[:-1]))
            assert out.write(piece) == len(piece)
            expected += piece
            assert out.tell() == len(expected)
        out.sync()
        assert (tmp_path / "file").read_bytes() == expected
        out.write(expected[:BUFFER_BYTES])
        out.sync()
    assert (tmp_path / "file").read_bytes() == expected + expected[:BUFFER_BYTES]


@pytest.mark.parametrize("seed", range(3))
def test_two_writers_share_blocks_and_keep_the_rest(tmp_path: Path, system: str, seed: int) -> None:
    """Two writers write neighbouring ranges in turns, as workers fill one shard."""
    rng = random.Random(seed)
    expected = bytearray(rng.randbytes(1_000_000))
    (tmp_path / "file").write_bytes(expected)
    bounds = sorted(rng.sample(range(len(expected)), 40))
    ranges = list(zip(bounds[:-1:2], bounds[1::2], strict=True))
    rng.shuffle(ranges)
    a, b = (DirectFile(tmp_path / "file", create=False) for _ in range(2))
    with a, b:
        for number, (start, stop) in enumerate(ranges):
            out, piece = (a, b)[number % 2], rng.randbytes(stop - start)
            out.seek(start)
            out.write(piece)
            expected[start:stop] = piece
        a.sync()
        b.sync()
    assert (tmp_path / "file").read_bytes() == expected


def test_large_pieces(tmp_path: Path) -> None:
    """Pieces larger than the buffer are written right by this machine's own file system."""
    piece = random.Random(0).randbytes(BUFFER_BYTES + 5)
    with DirectFile(tmp_path / "file", create=True) as out:
        out.write(b"head")
        out.write(piece)
        out.write(piece)
        out.sync()
    assert (tmp_path / "file").read_bytes() == b"head" + piece + piece
