"""What ``torch.save`` stores, written as a stream and read without running code.

Tensors: a ``.distcp`` file is a sequence of archives of one tensor each. ``torch.save`` needs the
whole tensor in memory and checksums it at a quarter of a gigabyte a second. The archive is a plain,
uncompressed zip file, so this module writes it chunk by chunk with `zipfile`. Reading finds the
tensor's bytes in the mapped file without copying them. ``torch.load`` would copy the whole tensor
for each part that is read: converting back then takes seven times as long.

Pickles: only what an allow-list admits is unpickled, in memory and time proportional to the data.
`pickle.Unpickler` calls nothing that `find_class` refuses, but a few bytes can still make it
reserve gigabytes (a memo index, a byte array's length), hash shared nested tuples forever, or
change the attributes of an admitted class. The unpickler written in Python keeps its memo in a
dictionary, and a subclass can refuse each of the others. Where Megatron or torch itself calls
``torch.load(weights_only=True)``, a hostile file runs no code either, but may fill the memory or
take hours until it is refused.

What Megatron saves beside a model's tensors, its arguments and optimizer and random states, is read
by the same unpickler. Each class is replaced by an inert stand-in, so that neither megatron nor
numpy is imported.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import torch
from torch import Tensor

try:  # three times as fast as zlib
    from isal.isal_zlib import crc32
except ImportError:  # a platform or a container without it
    from zlib import crc32

from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.disk import DirectFile, load_pages, map_file
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.errors import BadInput


class PickledObject:
    """An inert stand-in for one instance of a class named in the pickle."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        if not isinstance(self.state, dict) or name not in self.state:
            raise pickle.UnpicklingError(f"no field {name}")
        return self.state[name]


class NotAllowed(Exception):
    """The pickle names something outside the allow-list: its module and name."""


KEYS = (str, int, PickledObject)
"""Types allowed as dictionary keys and set members, since their hashes are cheap."""

FAILURES = (
    *(pickle.UnpicklingError, LookupError, TypeError, ValueError, EOFError, AttributeError),
    *(OverflowError, MemoryError, RuntimeError, AssertionError),
    struct.error,
)
"""The exceptions that reading a damaged pickle may raise."""

PYTHONS: Any = pickle._Unpickler
"""The unpickler written in Python; `pickle.Unpickler` is the one written in C."""


class RestrictedUnpickler(PYTHONS):
    """A base class; override `find_class` and, where needed, ``persistent_load``.

    ``load`` raises one of `FAILURES` on damaged data, and whatever the overrides raise.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(PYTHONS.dispatch)

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        raise NotAllowed(f"{module}.{name}")

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        PYTHONS.load_setitem(self)

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])
        PYTHONS.load_setitems(self)

    def load_additems(self) -> None:
        _check_keys(self.stack)
        PYTHONS.load_additems(self)

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], PickledObject):
            raise pickle.UnpicklingError("state for something that has none")
        PYTHONS.load_build(self)

    def refuse(self) -> None:
        raise pickle.UnpicklingError("an instruction that no checkpoint uses")

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.BUILD[0]] = load_build
    for _code in (
        *(pickle.BYTEARRAY8, pickle.DICT, pickle.FROZENSET, pickle.INST, pickle.OBJ),
        *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    ):
        dispatch[_code[0]] = refuse


def make_set(members: list[Any] | None = None) -> set[Any]:
    """Make a set for a pickle; empty `members`, lest the pickle copy one list many times."""
    if members is None:
        return set()
    _check_keys(members)
    made = set(members)
    members.clear()
    return made


def make_ordered_dict() -> OrderedDict[Any, Any]:
    """Make an empty `OrderedDict` for a pickle, which sets the items afterwards."""
    return OrderedDict()


def make_tuple(members: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Stand in for ``torch.Size`` in a pickle; return `members` itself, without a copy."""
    if not isinstance(members, tuple):
        raise pickle.UnpicklingError(f"a {type(members).__name__} as a size")
    return members


def reconstruct(cls: Callable[[], Any], *_: Any) -> Any:
    """Stand in for ``copyreg._reconstructor`` in a pickle, for admitted classes."""
    return cls()


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        if not isinstance(key, KEYS):
            raise pickle.UnpicklingError(f"a {type(key).__name__} as key")


def refusal_error(
    place: str | Path,
    named: object,
    remedy: str = "Do not use this checkpoint with a tool that would.",
) -> BadInput:
    """Return the error for a pickle at `place` that names something outside the allow-list."""
    return BadInput(
        f"{place} asks for {named!s:.200}, which has no place in a checkpoint. Refused: loading it "
        f"could run code. {remedy}"
    )


def torch_refusal_error(place: str | Path, error: pickle.UnpicklingError) -> BadInput:
    """Turn an error of ``torch.load(weights_only=True)`` into BadInput, without its long advice."""
    if named := re.search(r"GLOBAL (\S+)", str(error)):
        return refusal_error(place, named[1])
    return BadInput(f"{place} is damaged, or torch did not write it. Copy it again.")


zipfile.crc32 = crc32  # type: ignore[attr-defined]  # the name under which zipfile finds it

FOLDER = "archive"
EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's earliest date; a fixed date keeps the bytes reproducible
LARGEST_PICKLE = 2**16
"""Most bytes accepted for the pickle that describes one tensor; it usually has 150."""


class BadArchive(Exception):
    """The archive is damaged, or does not hold what was asked for."""


def as_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's values as bytes, in row-major order; copy only if it is not contiguous."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def write_archive(
    stream: BinaryIO | DirectFile, value: Any, storages: Iterable[tuple[int, Iterable[Tensor]]]
) -> None:
    """Append the archive of `value` to `stream`, as ``torch.save`` would, without seeking.

    Args:
        value: the object to store, with a `Described` in place of each tensor.
        storages: number of bytes and chunks of each tensor, in the order of `Described.storage`.
    """
    file: Any = _Unseekable(stream)
    with zipfile.ZipFile(file, "w") as archive:
        _add_part(archive, "data.pkl", [dumps(value)])
        _add_part(archive, "byteorder", [b"little"])
        for number, (size, chunks) in enumerate(storages):
            _add_part(archive, f"data/{number}", (as_bytes(chunk) for chunk in chunks), size)
        _add_part(archive, "version", [b"3\n"])


CHECKED_BYTES = 2**24
"""Bytes that are checked at a time; other threads read and write in between."""


class Sums:
    """The CRC-32 that archives state of their tensors' data; each is checked once."""

    def __init__(self) -> None:
        self._stated: dict[int, int | None] = {}  # by the data's address; None: it was right

    def note(self, data: Tensor, stated: int) -> None:
        """Note what an archive states of `data`, all bytes of one storage."""
        self._stated.setdefault(data.data_ptr(), stated)

    def check(self, tensor: Tensor) -> None:
        """Check all data of the storage of `tensor`, a view of an archive.

        Raises:
            BadArchive: the data has another checksum.
            OSError: it cannot be read.
        """
        data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        if (stated := self._stated.get(data.data_ptr())) is None:
            return
        actual = 0
        for piece in data.split(CHECKED_BYTES):
            actual = crc32(as_bytes(load_pages(piece)), actual)
        if actual != stated:
            raise BadArchive(f"its CRC-32 is {actual:08x}, and {stated:08x} was saved")
        self._stated[data.data_ptr()] = None


def read_tensor(view: memoryview, sums: Sums | None = None) -> Tensor:
    """Return the tensor in an archive, sharing `view`'s memory.

    The archive is not trusted: the offsets of its parts are checked against each other, and the
    tensor's extent against its data, before use. The checksum of its data is noted in `sums`.

    Raises:
        BadArchive: the archive is damaged, or holds anything but one strided CPU tensor.
    """
    with _damage_as_bad_archive():
        tensor = TensorUnpickler(Archive(view, sums), LARGEST_PICKLE).load()
        if not isinstance(tensor, Tensor):
            raise BadArchive(f"it holds {type(tensor).__name__}, not a tensor")
        if tensor.dtype not in STORAGES:
            raise BadArchive(f"it holds {dtype_name(tensor.dtype)}, which no model's tensor is")
        return tensor


class Archive:
    """The parts of an archive that is being read; its methods raise `BadArchive` on damage.

    A part is checked when it is asked for; damage to one that nothing asks for is not found.
    """

    def __init__(self, view: memoryview, sums: Sums | None = None) -> None:
        self._view = view
        self._sums = sums or Sums()
        with _damage_as_bad_archive():
            self._zip = zipfile.ZipFile(_View(view))
            self._folder = self._zip.namelist()[0].split("/")[0]
        self._parts: dict[str, list[zipfile.ZipInfo]] = {}
        for part in self._zip.infolist():
            self._parts.setdefault(part.filename, []).append(part)
        # Old archives do not state the byte order; all machines were little-endian.
        stated = any(name.endswith("/byteorder") for name in self._parts)
        if stated and self.read_small("byteorder", LARGEST_PICKLE) != b"little":
            raise BadArchive("it was written by a big-endian machine")

    def read_small(self, name: str, largest: int) -> bytes:
        """Return the content of a part of at most `largest` bytes, after checking its checksum."""
        part = self._part(name)
        if part.file_size > largest:
            raise BadArchive(f"{name} has {part.file_size} bytes")
        with _damage_as_bad_archive():
            return self._zip.read(part)

    def tensor_data(self, key: str) -> memoryview:
        """Return the data of a tensor without a copy; its checksum is noted, but not checked."""
        part = self._part(f"data/{key}")
        with _damage_as_bad_archive():
            start = _data_start(self._view, part)
        data = self._view[start : start + part.file_size]
        if data:
            self._sums.note(torch.frombuffer(data, dtype=torch.uint8), part.CRC)
        return data

    def _part(self, name: str) -> zipfile.ZipInfo:
        parts = self._parts.get(f"{self._folder}/{name}", [])
        if len(parts) != 1:
            raise BadArchive(f"it holds {len(parts)} parts named {name}")
        if parts[0].compress_type != zipfile.ZIP_STORED:
            raise BadArchive(f"{name} is compressed")
        return parts[0]


@contextmanager
def _damage_as_bad_archive() -> Iterator[None]:
    """Turn the exceptions of reading a damaged archive into BadArchive."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, OSError, NotAllowed, *FAILURES) as error:
        raise BadArchive(f"{error!r:.200}") from error


def _data_start(view: memoryview, part: zipfile.ZipInfo) -> int:
    """Return the offset of the bytes of `part`.

    A local header with wrong lengths would shift the data, so the bytes right after the data must
    be what a zip file has there.
    """
    at = part.header_offset
    name, extra = struct.unpack("<HH", view[at + 26 : at + 30])
    start = at + 30 + name + extra
    after = bytes(view[start + part.file_size : start + part.file_size + 8])
    if part.flag_bits & 8:
        sound = after == b"PK\7\x08" + struct.pack("<I", part.CRC)
    else:
        sound = after[:4] in (b"PK\3\4", b"PK\1\2")
    named = bytes(view[at + 30 : at + 30 + name]) == part.orig_filename.encode()
    if not (sound and named and view[at : at + 4] == b"PK\3\4"):
        raise BadArchive(f"the parts around {part.filename} do not fit together")
    return start


def _add_part(
    archive: zipfile.ZipFile, name: str, chunks: Iterable[bytes | memoryview], size: int = 0
) -> None:
    """Write one part of an archive; `size` decides whether its header is for large parts."""
    info = zipfile.ZipInfo(f"{FOLDER}/{name}", EPOCH)
    with archive.open(info, "w", force_zip64=size >= 2**31) as entry:
        for chunk in chunks:
            entry.write(chunk)


class _Unseekable:
    """A stream that makes `zipfile` count offsets from 0 and write sizes after the data."""

    def __init__(self, stream: BinaryIO | DirectFile) -> None:
        self.write = stream.write

    def flush(self) -> None:
        """Do nothing; `zipfile` flushes at the end."""


class _View(io.RawIOBase):
    """A read-only file over a memoryview, without copying it."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read at most what is left, so that a damaged file's `size` reserves no more memory."""
        stop = len(self._view) if size is None or size < 0 else self._at + size
        part = bytes(self._view[self._at : stop])
        self._at += len(part)
        return part


STORAGES: dict[torch.dtype, Any] = {
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.float32: torch.FloatStorage,
}
"""The classes that stand for a model's dtypes in torch's pickles."""


@dataclass(frozen=True)
class Described:
    """A stand-in that pickles as the contiguous CPU tensor that it describes, without its data.

    `storage` is the number of the tensor's storage in the archive.
    """

    dtype: torch.dtype
    shape: Shape
    storage: int = 0

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        memory = _Memory(self.dtype, str(self.storage), prod(self.shape))
        stride = tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        hooks: OrderedDict[str, Any] = OrderedDict()
        arguments = (memory, 0, tuple(self.shape), stride, False, hooks)
        return torch._utils._rebuild_tensor_v2, arguments


class _Memory(NamedTuple):
    """A stand-in for a tensor's storage; `key` is its number in the archive."""

    dtype: torch.dtype
    key: str
    values: int


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Memory):
            return ("storage", STORAGES[obj.dtype], obj.key, "cpu", obj.values)
        return None


def dumps(value: Any) -> bytes:
    """Pickle `value`, which may hold `Described` tensors, as ``torch.save`` does."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


class TensorUnpickler(RestrictedUnpickler):
    """An unpickler of tensors, which become views of the archive's data, and plain containers.

    Raises:
        Refused: the pickle names something else that has no stand-in.
    """

    def __init__(
        self,
        archive: Archive,
        largest: int,
        stand_ins: Mapping[str, type[PickledObject]] | None = None,
    ) -> None:
        """Read a pickle of at most `largest` bytes.

        Args:
            stand_ins: classes to use in place of the pickle's classes, by module and name; nothing
                of that module is imported.
        """
        super().__init__(archive.read_small("data.pkl", largest))
        self._archive, self._stand_ins = archive, stand_ins or {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}".replace("builtins.", "__builtin__.")
        # Parameters are rebuilt without the attributes that Megatron sets.
        functions: dict[str, Callable[..., Any]] = {
            "torch._utils._rebuild_tensor_v2": self._rebuild,
            "torch._utils._rebuild_tensor_v3": self._rebuild_untyped,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
            "torch._tensor._rebuild_from_type_v2": lambda make, _, arguments, *__: make(*arguments),
            "collections.OrderedDict": make_ordered_dict,
            "torch.Size": make_tuple,
            "__builtin__.set": make_set,
        }
        named = functions.get(full) or self._stand_ins.get(full) or _dtype_of(module, name)
        if named is None:
            raise NotAllowed(f"{module}.{name}")
        return named

    def persistent_load(self, pid: Any) -> _Memory:
        _, dtype, key, _, count = pid
        if not isinstance(dtype, torch.dtype) or not isinstance(key, str) or not key.isdigit():
            raise pickle.UnpicklingError("not a plain storage")
        return _Memory(dtype, key, count)

    def load_build(self) -> None:
        if type(self.stack[-2]) is OrderedDict:
            self.stack.pop()  # the versions that a module's state_dict() keeps as an attribute
            return
        super().load_build()

    dispatch = {**RestrictedUnpickler.dispatch, pickle.BUILD[0]: load_build}  # noqa: RUF012

    def _rebuild(self, memory: _Memory, offset: int, size: Any, stride: Any, *_: Any) -> Any:
        """Make a view of the data, after checking that it lies within them."""
        dtype, key, count = memory
        numbers = (count, offset, *size, *stride)
        if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
            raise pickle.UnpicklingError("a size that is not a count")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if prod(size) > count or last >= max(count, 1):
            raise pickle.UnpicklingError("the tensor is larger than its data")
        data = self._archive.tensor_data(key)
        if len(data) != count * dtype.itemsize:
            raise pickle.UnpicklingError(f"{len(data)} bytes of data, not {count} values")
        if 0 in size:
            return torch.empty(tuple(size), dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).as_strided(tuple(size), tuple(stride), offset)

    def _rebuild_untyped(
        self, memory: Any, offset: int, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any,
        *_: Any,
    ) -> Any:  # fmt: skip
        """Rebuild a tensor whose dtype has no storage class, from untyped bytes."""
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("a tensor without a dtype")
        # An untyped storage counts bytes.
        typed = memory._replace(dtype=dtype, values=memory.values // dtype.itemsize)
        return self._rebuild(typed, offset, size, stride)


def _dtype_of(module: str, name: str) -> torch.dtype | None:
    """Return the dtype of this name, or that of the storage class of this name."""
    if (module, name) == ("torch.storage", "UntypedStorage"):
        return torch.uint8
    value: Any = getattr(torch, name, None) if module == "torch" else None
    if isinstance(value, type) and issubclass(value, torch.storage._LegacyStorage):
        value = value._dtype
    return value if isinstance(value, torch.dtype) else None


STAND_INS = (
    # The arguments' values: enumerations of Megatron and Python, paths, nested namespaces.
    "argparse.Namespace",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
    "signal.Signals",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "types.SimpleNamespace",
    # numpy's random state.
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    # The state of Megatron's optimizer and of its rerun state machine.
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    # Transformer Engine's FP8 state, as older versions save it.
    "_io.BytesIO",
    # Small objects of Python and torch, which are not parts of parameters.
    "_codecs.encode",  # bytes, under the pickle protocol that torch uses
    "__builtin__.bytearray",
    "__builtin__.complex",
    "collections.Counter",
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
)
"""What Megatron saves beside tensors; ``megatron.core.safe_globals`` admits these names."""


def load(file: Path, part: slice = slice(None), sums: Sums | None = None) -> Any:
    """Return the content of a file of Megatron's, or of the bytes `part` of it.

    Tensors are copy-on-write views of the mapped file. The arguments are an ``argparse.Namespace``.
    Every other object that is not a tensor or a plain container is a `PickledObject`. The checksums
    of the tensors' data are noted in `sums`.

    Raises:
        BadInput: the file is damaged, or names something outside the list.
    """
    try:
        archive = Archive(map_file(file)[part], sums)
        content = TensorUnpickler(archive, 2**40, _CLASSES).load()
        for state in content if isinstance(content, list) else [content]:
            if isinstance(state, dict) and isinstance(state.get("args"), _NAMESPACE):
                # A TypeError, as on other damage, if the arguments are not named.
                state["args"] = Namespace(**state["args"].state)
        return content
    except NotAllowed as error:
        remedy = (
            "If you trust the file, load it in Megatron and save it again with --ckpt-format "
            "torch_dist."
        )
        raise refusal_error(file, error, remedy) from None
    except (OSError, BadArchive, *FAILURES) as error:
        raise BadInput(
            f"{file} cannot be read ({type(error).__name__}: {error!s:.200}). Copy the file again."
        ) from None


def arguments_in(state: Any) -> Mapping[str, Any]:
    """Return the arguments in a state, or in a list that begins with one; empty if it has none."""
    first = state[0] if isinstance(state, list) and state else state
    args = first.get("args") if isinstance(first, dict) else None
    return vars(args) if isinstance(args, Namespace) else {}


_CLASSES = {name: type("StandIn", (PickledObject,), {}) for name in STAND_INS}
_NAMESPACE = _CLASSES["argparse.Namespace"]
