"""Pickles of torch's checkpoint metadata: what they may name, also for torch's own calls.

``.metadata`` of a ``torch_dist`` checkpoint is a pickle of torch classes. :func:`loads_metadata`
never builds those classes: it replaces the few expected names with inert records and refuses every
other name. So a hostile file cannot run code. A file of a newer torch can still be read, although
its classes have more fields. :class:`MetadataPickler` writes only the fields that the oldest
supported torch knows. :func:`guard_reads` holds the calls of torch and Megatron to the same rules.

Only the guard and the pickler import torch's classes, which takes almost as long as torch itself.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from functools import cache
from typing import Any

import torch
import xxhash

from mcore_qwen3vl.converters.storage.archive import (
    NotAllowed,
    PickledObject,
    RestrictedUnpickler,
    make_ordered_dict,
    make_set,
    make_tuple,
    reconstruct,
    refusal_error,
    torch_refusal_error,
)

METADATA = ".metadata"
"""The file of an iteration's folder that says where each tensor is."""

_MARK = b"\nxxh3_128 "
"""What precedes the checksum. It follows the pickle, at whose end every reader stops."""


def with_checksum(content: bytes) -> bytes:
    """Return a pickle with its checksum behind it."""
    return content + _MARK + xxhash.xxh3_128_hexdigest(content).encode()


def without_checksum(data: bytes) -> bytes:
    """Return the pickle alone, after checking it; other projects write no checksum."""
    content, mark, stated = data.rpartition(_MARK)
    if mark and stated != xxhash.xxh3_128_hexdigest(content).encode():
        raise pickle.UnpicklingError("it has other bytes than were saved, by its own checksum")
    return content if mark else data


def loads_metadata(data: bytes) -> Any:
    """Return the pickle's content with every class replaced by an inert `PickledObject`."""
    return _Unpickler(without_checksum(data)).load()


def guard_reads() -> None:
    """Make torch and Megatron in this process refuse the classes that `read_metadata` refuses.

    Both read ``.metadata`` with ``FileSystemReader.read_metadata``, which unpickles whatever the
    file names. The patch also lets them read the files of every torch version, and adds a checksum
    to the files that they write. A second call changes nothing. Afterwards torch's own calls raise
    BadInput if the file names a class or function that does not belong there.

    The objects beside the tensors are read by ``DefaultLoadPlanner.load_bytes``, with
    ``torch.load(weights_only=False)``. Afterwards these may name what torch and Megatron allow
    (``megatron.core.safe_globals``), otherwise BadInput is raised, which torch wraps in its
    ``CheckpointException``.
    """
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    filesystem.pickle = _GuardedPickle  # type: ignore[assignment]
    DefaultLoadPlanner.load_bytes = _load_object  # type: ignore
    _keep_to_old_fields()


def _load_object(planner: Any, item: Any, stream: Any) -> None:
    """Put an object of a checkpoint into the state dict of torch's ``DefaultLoadPlanner``."""
    from torch.distributed.checkpoint._nested_dict import set_element

    name = item.dest_index.fqn
    try:
        value = torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:  # which advises to load the file without the guard
        raise torch_refusal_error(f"{name} of the checkpoint", error) from None
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], value)
    else:
        planner.state_dict[name] = value


@cache
def _own_state_methods() -> tuple[Any, Any]:
    """Return the ``__getstate__`` and ``__setstate__`` that torch's ``TensorProperties`` has.

    They are looked up once, since `_keep_to_old_fields` then replaces them.
    """
    from torch.distributed.checkpoint.metadata import TensorProperties

    return TensorProperties.__getstate__, TensorProperties.__setstate__


_FIELDS = 5
"""The number of fields of ``TensorProperties`` in torch 2.0 to 2.14."""


def _keep_to_old_fields() -> None:
    """Remove ``strides`` from torch's ``TensorProperties``; torch 2.15 adds but never reads it.

    megatron-core 0.19 passes all fields to ``torch.empty``, which has no such argument. torch
    before 2.15 cannot read a file with the field.
    """
    from torch.distributed.checkpoint.metadata import TensorProperties

    properties: Any = TensorProperties
    get_state, set_state = _own_state_methods()
    if hasattr(properties, "strides"):
        properties.strides = property(lambda self: None, lambda self, value: None)
    properties.__getstate__ = lambda self: get_state(self)[:_FIELDS]
    properties.__setstate__ = lambda self, state: set_state(self, state[:_FIELDS])


class _GuardedPickle:
    """A stand-in for the module ``pickle`` in torch's reader and writer of ``.metadata``."""

    @staticmethod
    def dump(metadata: Any, stream: Any) -> None:
        stream.write(with_checksum(pickle.dumps(metadata)))

    @staticmethod
    def load(stream: Any) -> Any:
        try:
            return _Admitting(io.BytesIO(without_checksum(stream.read()))).load()
        except NotAllowed as error:
            raise refusal_error(getattr(stream, "name", METADATA), error) from None


class _Admitting(pickle.Unpickler):
    """An unpickler of torch's own classes, but only of those that `_Unpickler` admits."""

    def find_class(self, module: str, name: str) -> Any:
        _stand_in_of(module, name)  # raises NotAllowed for what is not admitted
        return super().find_class(CALLED.get(module, module), name)


class MetadataPickler(pickle.Pickler):
    """A pickler that writes ``TensorProperties`` with the fields known to every torch."""

    def reducer_override(self, obj: Any) -> Any:
        from torch.distributed.checkpoint import metadata as dcp

        if not isinstance(obj, dcp.TensorProperties):
            return NotImplemented
        contiguous = dcp._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
        state = (obj.dtype, torch.strided, False, contiguous, False)
        return copyreg.__newobj__, (dcp.TensorProperties,), state  # type: ignore[attr-defined]


DCP = "torch.distributed.checkpoint"
RECORDS = {
    f"{DCP}.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    # Megatron keeps the ranks' save plans beside the metadata, to reuse them at the next save. With
    # --ckpt-assume-constant-structure it also keeps the prefix of the files that they write.
    f"{DCP}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{DCP}.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    # Megatron's own classes of plans (June 2024 to December 2025) and metadata (0.15).
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    # The value of these is not needed.
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
}
STAND_INS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): make_tuple,
    ("collections", "OrderedDict"): make_ordered_dict,
    ("builtins", "set"): make_set,
    ("copyreg", "_reconstructor"): reconstruct,
    ("builtins", "object"): PickledObject,
    **{
        (m, name): type(name, (PickledObject,), {})
        for m, names in RECORDS.items()
        for name in names
    },
}
CALLED = {"__builtin__": "builtins", "copy_reg": "copyreg", "pathlib._local": "pathlib"}
"""What Python 3.12 calls modules that Python 2's pickles, or Python 3.13, name otherwise."""


class _Unpickler(RestrictedUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _stand_in_of(module, name)


def _stand_in_of(module: str, name: str) -> Any:
    """Return the stand-in for a class or function; raise NotAllowed if no sound file names it."""
    if (stand_in := STAND_INS.get((CALLED.get(module, module), name))) is not None:
        return stand_in
    if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
        return dtype
    raise NotAllowed(f"{module}.{name}")
