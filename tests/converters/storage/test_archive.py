"""Archives are read as torch writes them; pickles that would take hours are refused."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tracemalloc
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.converters import torch_dist
from mcore_qwen3vl.converters.legacy import check_run, open_ranks
from mcore_qwen3vl.converters.storage.archive import (
    STORAGES,
    BadArchive,
    Described,
    dumps,
    load,
    read_tensor,
    write_archive,
)
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.errors import BadInput

HEAD = b"\x80\x04"
METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


@contextmanager
def little_memory(most: int = 32 * 2**20) -> Iterator[None]:
    """Check that Python's objects take at most this many bytes more; tensors do not count."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def shared_tuples(levels: int) -> bytes:
    """Return a pickle of ((..., ...), (..., ...)): `levels` tuples but 2**levels leaves to hash."""
    return b")" + b"".join(b"2\x86" for _ in range(levels))


def memoised_tuples(levels: int) -> bytes:
    """Return the same with only instructions that torch's own restricted unpickler knows."""
    start = b")q\x00"
    return start + b"".join(bytes((104, n, 104, n, 0x86, 113, n + 1)) for n in range(levels))


BOMBS = {
    "key": b"}" + shared_tuples(64) + b"Ns.",
    "keys": b"}(" + shared_tuples(64) + b"Nu.",
    "memoised keys": b"}(" + memoised_tuples(64) + b"Nu.",
    "memoised members": b"c__builtin__\nset\n](" + memoised_tuples(64) + b"e\x85R.",
    "members": b"\x8f(" + shared_tuples(64) + b"\x90.",
    "frozen set": b"(" + shared_tuples(64) + b"\x91.",
    "dictionary": b"(" + shared_tuples(64) + b"Nd.",
    "set by call": b"cbuiltins\nset\n(" + shared_tuples(64) + b"l\x85R.",
    "ordered by call": b"ccollections\nOrderedDict\n(" + shared_tuples(64) + b"N\x86l\x85R.",
    "class attribute": METADATA + b"}X\x05\x00\x00\x00stateNsb.",
    "class attributes by slots": METADATA + b"N}X\x05\x00\x00\x00stateNs\x86b.",
    "nested lists": b"]" * 100_000 + b"a" * 99_999 + b".",
    "a shape": METADATA + b")\x81}(X\x0c\x00\x00\x00storage_data}X\x13\x00\x00\x00"
    b"state_dict_metadata}X\x01\x00\x00\x00x" + shared_tuples(64) + b"ssub.",
}

HARMLESS = {"nested lists"}
"""Bombs that a legacy file may hold, because its reader neither reserves nor copies anything."""


@pytest.mark.parametrize("name", BOMBS)
def test_metadata_bomb(tmp_path: Path, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(HEAD + BOMBS[name])
    refused = pytest.raises(BadInput, match="is not readable checkpoint metadata")
    with little_memory(), refused:
        torch_dist.read_metadata(tmp_path)


@pytest.mark.parametrize("name", BOMBS)
def test_legacy_bomb(tmp_path: Path, name: str) -> None:
    """It is refused, or takes little memory, alone and as one value of an otherwise sound file."""
    file = tmp_path / "file.pt"
    for content in (BOMBS[name], b"}X\x05\x00\x00\x00other" + BOMBS[name][:-1] + b"s."):
        file.write_bytes(zipped({"data.pkl": b"\x80\x02" + content, "version": b"3\n"}))
        refused = pytest.raises(BadInput, match=r"cannot be read|Refused: loading it could")
        with little_memory(), nullcontext() if name in HARMLESS else refused:
            load(file)


def test_arguments_that_never_end_when_they_are_printed(tmp_path: Path) -> None:
    """With shared tuples as a parallel size, a message that printed the value would never end."""
    arguments = b"cargparse\nNamespace\n)\x81}X\x1a\x00\x00\x00tensor_model_parallel_size"
    arguments += shared_tuples(64) + b"sb"
    content = b"}X\x04\x00\x00\x00args" + arguments + b"s."
    file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir()
    file.write_bytes(zipped({"data.pkl": HEAD + content, "byteorder": b"little"}))
    with pytest.raises(BadInput, match="give a tuple as a parallel size"):
        open_ranks(tmp_path)
    with pytest.raises(BadInput, match="tensor_model_parallel_size a tuple instead of 2"):
        check_run(tmp_path, Namespace(tensor_model_parallel_size=2, num_experts=None))


def zipped(parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> memoryview:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(f"archive/{name}", content)
    return memoryview(bytearray(stream.getvalue()))


@pytest.mark.parametrize("name", BOMBS)
def test_tensor_bomb(name: str) -> None:
    archive = zipped({"data.pkl": HEAD + BOMBS[name], "data/0": b""})
    with little_memory(), pytest.raises(BadArchive):
        read_tensor(archive)


def test_compressed_bomb() -> None:
    archive = zipped({"data.pkl": bytes(2**26)}, zipfile.ZIP_DEFLATED)
    with little_memory(), pytest.raises(BadArchive, match="compressed"):
        read_tensor(archive)


def test_encrypted_part() -> None:
    archive = zipped({"data.pkl": b"N.", "data/0": b""})
    directory = bytes(archive).index(b"PK\1\2")
    archive[directory + 8] |= 1  # the flag for encryption
    with pytest.raises(BadArchive, match="encrypted"):
        read_tensor(archive)


def rewritten(tmp_path: Path, change: Callable[[zipfile.ZipFile, str, bytes], None]) -> Path:
    """Return an archive of ones whose parts `change` wrote, from torch's own names and contents."""
    sound, file = tmp_path / "sound.pt", tmp_path / "rewritten.pt"
    torch.save([torch.ones(3)], sound)
    with zipfile.ZipFile(sound) as stored, zipfile.ZipFile(file, "w") as written:
        for name in stored.namelist():
            change(written, name, stored.read(name))
    return file


def test_what_a_big_endian_machine_saved_is_refused(tmp_path: Path) -> None:
    def write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
        archive.writestr(name, b"big" if name.endswith("/byteorder") else content)

    with pytest.raises(BadInput, match="was written by a big-endian machine"):
        load(rewritten(tmp_path, write))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("part", ["data.pkl", "byteorder", "data/0"])
def test_a_part_that_is_read_is_there_once_and_uncompressed(tmp_path: Path, part: str) -> None:
    def double(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
        archive.writestr(name, content)
        if name.endswith(f"/{part}"):
            archive.writestr(name, content)

    def compress(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
        here = name.endswith(f"/{part}")
        archive.writestr(name, content, zipfile.ZIP_DEFLATED if here else zipfile.ZIP_STORED)

    with pytest.raises(BadInput, match=f"2 parts named {part}"):
        load(rewritten(tmp_path, double))
    with pytest.raises(BadInput, match=f"{part} is compressed"):
        load(rewritten(tmp_path, compress))


def archive(tensor: torch.Tensor, pieces: int = 1) -> bytes:
    stream = io.BytesIO()
    described = Described(tensor.dtype, tuple(tensor.shape))
    write_archive(stream, described, [(tensor.nbytes, tensor.chunk(pieces))])
    return stream.getvalue()


def torch_archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("shape", [(6, 5), (1, 1, 6, 3), (6,), (1,)])
def test_archives_are_torchs_own(dtype: torch.dtype, shape: Shape) -> None:
    tensor = torch.randn(shape).to(dtype)
    ours = archive(tensor, pieces=2)
    loaded = torch.load(io.BytesIO(ours), weights_only=True)
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor)
    with zipfile.ZipFile(io.BytesIO(torch_archive(tensor))) as theirs:
        assert theirs.read("archive/data.pkl") == dumps(Described(dtype, shape))
    with zipfile.ZipFile(io.BytesIO(ours)) as opened:
        assert opened.testzip() is None  # every checksum holds
    for data in (ours, torch_archive(tensor)):
        assert torch.equal(read_tensor(memoryview(bytearray(data))), tensor)


def test_isal_computes_the_checksums_where_it_is_installed(tmp_path: Path) -> None:
    """A stand-in for it notes what it is called with, as data is written and as it is checked."""
    (tmp_path / "isal").mkdir()
    (tmp_path / "isal" / "__init__.py").touch()
    (tmp_path / "isal" / "isal_zlib.py").write_text(
        "import zlib\nsizes = []\n"
        "def crc32(data, value=0):\n    sizes.append(len(data))\n    return zlib.crc32(data, value)"
    )
    code = (
        "import io, torch\n"
        "from isal.isal_zlib import sizes\n"
        "from mcore_qwen3vl.converters.storage import archive\n"
        "stream, described = io.BytesIO(), archive.Described(torch.float32, (250,))\n"
        "archive.write_archive(stream, described, [(1000, [torch.ones(250)])])\n"
        "print(sizes.count(1000))\n"
        "sums = archive.Sums()\n"
        "sums.check(archive.read_tensor(memoryview(bytearray(stream.getvalue())), sums))\n"
        "print(sizes.count(1000))\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["1", "2"], done.stderr


def test_reading_does_not_copy() -> None:
    data = bytearray(archive(torch.arange(8.0)))
    tensor = read_tensor(memoryview(data))
    at = data.index(torch.arange(8.0).numpy().tobytes())
    data[at : at + 4] = torch.tensor([99.0]).numpy().tobytes()
    assert tensor[0] == 99


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0)[3:6],
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(0, 3),
        torch.tensor(2.0),
    ],
    ids=["transposed", "view", "parameter", "empty", "scalar"],
)
def test_other_tensors_are_read(value: torch.Tensor) -> None:
    assert torch.equal(read_tensor(memoryview(bytearray(torch_archive(value)))), value)


@pytest.mark.parametrize(
    "value",
    [
        [torch.ones(2)],
        {"a": 1},
        torch.ones(3, dtype=torch.int64),
        torch.ones(3).expand(2**40, 3),
        torch.ones(3).to_sparse(),
    ],
    ids=["list", "dict", "integers", "expanded", "sparse"],
)
def test_other_content_is_refused(value: Any) -> None:
    with pytest.raises(BadArchive):
        read_tensor(memoryview(bytearray(torch_archive(value))))
