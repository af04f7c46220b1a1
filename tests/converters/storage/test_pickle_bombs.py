"""Pickles of a few bytes that would take gigabytes, hours, or change what is read after them."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.storage.archive import NotATensor, read_tensor
from mcore_qwen3vl.converters.torch_dist import metadata
from mcore_qwen3vl.errors import BadInput

HEAD = b"\x80\x04"
METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


def shared_tuples(levels: int) -> bytes:
    """((..., ...), (..., ...)): 2**levels leaves to hash, though only `levels` tuples."""
    return b")" + b"".join(b"2\x86" for _ in range(levels))


BOMBS = {
    "memo index": b"N" + b"r" + struct.pack("<I", 2**31) + b".",
    "byte array": b"\x96" + struct.pack("<Q", 2**34) + b".",
    "bytes": b"\x8e" + struct.pack("<Q", 2**34) + b".",
    "text": b"\x8d" + struct.pack("<Q", 2**34) + b".",
    "frame": b"\x95" + struct.pack("<Q", 2**34) + b"N.",
    "long": b"\x8b" + struct.pack("<i", 2**31 - 1) + b".",
    "key": b"}" + shared_tuples(64) + b"Ns.",
    "keys": b"}(" + shared_tuples(64) + b"Nu.",
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


def small(peak: int) -> bool:
    return peak < 32 * 2**20


@pytest.mark.parametrize("name", BOMBS)
def test_metadata_bomb(tmp_path: Path, name: str) -> None:
    (tmp_path / ".metadata").write_bytes(HEAD + BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="is not readable checkpoint metadata"):
            metadata.read(tmp_path)
        assert small(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def zipped(parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> memoryview:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(f"archive/{name}", content)
    return memoryview(bytearray(stream.getvalue()))


@pytest.mark.parametrize("name", BOMBS)
def test_tensor_bomb(name: str) -> None:
    archive = zipped({"data.pkl": HEAD + BOMBS[name], "data/0": b""})
    tracemalloc.start()
    try:
        with pytest.raises(NotATensor):
            read_tensor(archive)
        assert small(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def test_compressed_bomb() -> None:
    archive = zipped({"data.pkl": bytes(2**26)}, zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    try:
        with pytest.raises(NotATensor, match="compressed"):
            read_tensor(archive)
        assert small(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def test_encrypted_part() -> None:
    archive = zipped({"data.pkl": b"N.", "data/0": b""})
    directory = bytes(archive).index(b"PK\1\2")
    archive[directory + 8] |= 1  # the flag: encrypted
    with pytest.raises(NotATensor, match="encrypted"):
        read_tensor(archive)
