"""Guards of ``torch.load``: bounds on what it unpacks and makes, and short errors for refusals."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from torch import _weights_only_unpickler, serialization

from mcore_qwen3vl.errors import BadInput

_NAMED = re.compile(r"GLOBAL (\S+)")


def refused_by_torch(place: str | Path, error: pickle.UnpicklingError) -> BadInput:
    """Turn an error of ``torch.load(weights_only=True)`` into BadInput, without its long advice."""
    if named := _NAMED.search(str(error)):
        return BadInput(
            f"{place} asks for {named[1]}, which has no place in a checkpoint. Refused: loading it "
            "could run code. Do not use this checkpoint with a tool that would."
        )
    return BadInput(f"{place} is damaged, or torch did not write it. Copy it again.")


def refuse_bombs() -> None:
    """Make ``torch.load`` in this process refuse small files that would fill the memory.

    torch stores the parts of an archive without compression, each at a place of its own. A file
    whose parts are compressed, or overlap, would fill the memory before its content is looked at.
    So would a pickle that calls one of the functions that ``weights_only=True`` admits with a size,
    or with a tensor whose strides are 0. A second call changes nothing. Afterwards ``torch.load``
    raises BadInput for such an archive, and UnpicklingError for such a pickle.
    """
    serialization._open_zipfile_reader = _BoundedReader  # type: ignore[misc]
    admitted = _weights_only_unpickler._get_allowed_globals()  # the one dictionary that torch keeps
    admitted.update(_OF_PLAIN_VALUES)
    for name in _COPIES_OF_TENSORS:
        admitted.pop(name, None)


def _of_plain_values(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make`, which refuses a size or a tensor as its argument."""

    def made(*values: Any) -> Any:
        if not all(isinstance(value, str | bytes | list | dict) for value in values):
            raise pickle.UnpicklingError(f"a {make.__name__} that is made from no plain value")
        return make(*values)

    return made


_OF_PLAIN_VALUES = {
    "builtins.bytearray": _of_plain_values(bytearray),
    "builtins.set": _of_plain_values(set),
    "collections.Counter": _of_plain_values(Counter),
}
_COPIES_OF_TENSORS = (
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
)
"""What torch admits for devices that are neither CPU nor GPU."""


class _BoundedReader(serialization._open_zipfile_reader):
    def __init__(self, name_or_buffer: str | IO[bytes]) -> None:
        if not isinstance(name_or_buffer, str):
            _check_size(name_or_buffer)
        super().__init__(name_or_buffer)


class _Seekable:
    """Reads a stream for `zipfile`; torch's views of a part of a file seek wrongly from the end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        stream.seek(0, io.SEEK_END)
        self.size = stream.tell()
        self.read, self.tell = stream.read, stream.tell

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.size}[whence]
        self._stream.seek(base + offset)
        return base + offset


def _check_size(stream: IO[bytes]) -> None:
    before = stream.tell()
    file: Any = _Seekable(stream)
    try:
        unpacked = sum(part.file_size for part in zipfile.ZipFile(file).infolist())
    except (zipfile.BadZipFile, OSError, ValueError):
        unpacked = 0  # torch itself will say that it is damaged
    finally:
        stream.seek(before)
    if unpacked > file.size:
        raise BadInput(
            f"{getattr(stream, 'name', 'A part of the checkpoint')} has {file.size:,} bytes, which "
            f"unpack to {unpacked:,}. Refused: torch writes no such file, and unpacking it could "
            "fill the memory. Copy the checkpoint again from a place that you trust."
        )
