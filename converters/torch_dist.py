"""Megatron-Core's ``torch_dist`` checkpoints, read and written a tensor at a time.

Neither needs megatron-core, a model or a process group. A checkpoint directory holds
``latest_checkpointed_iteration.txt`` ("release" or a number) and one folder per iteration with
``.metadata``, ``metadata.json`` and ``.distcp`` files of tensors, each in its own archive.

The classes that ``.metadata`` may name are those of :mod:`.torch_pickle`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.converters.formats import CheckpointFormat
from mcore_qwen3vl.converters.identify import CHECKPOINT_CONFIG
from mcore_qwen3vl.converters.mapping.table import Row
from mcore_qwen3vl.converters.megatron_checkpoint import (
    CheckpointIndex,
    Chunk,
    ChunkedTensor,
    FileRange,
    MegatronCheckpoint,
)
from mcore_qwen3vl.converters.storage.archive import (
    FAILURES,
    BadArchive,
    Described,
    NotAllowed,
    PickledObject,
    Sums,
    arguments_in,
    load,
    read_tensor,
    refusal_error,
    write_archive,
)
from mcore_qwen3vl.converters.storage.boxes import Shape, are_exact_cover
from mcore_qwen3vl.converters.storage.disk import DirectFile, load_pages, map_file
from mcore_qwen3vl.converters.torch_pickle import (
    METADATA,
    MetadataPickler,
    loads_metadata,
    with_checksum,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_special_files
from mcore_qwen3vl.json_and_yaml import parse_json

ENDS = 2**16
"""Bytes at each end of an archive; the two ends hold everything but the tensor's data."""


class TorchDistCheckpoint(MegatronCheckpoint):
    """The tensors of one iteration of a ``torch_dist`` checkpoint, written under any layout.

    Raises:
        BadInput: the folder is not a ``torch_dist`` checkpoint, the metadata is damaged, a data
            file is absent or cut short, or the chunks do not fill a tensor exactly once.
    """

    def __init__(self, folder: Path) -> None:
        _check_backend(folder)
        index = read_metadata(folder)
        chunks = [chunk for tensor in index.tensors.values() for chunk in tensor.chunks]
        files = [folder / name for name in dict.fromkeys(chunk.data.file for chunk in chunks)]
        super().__init__(folder, index, files, folder / METADATA)
        self._mapped: dict[str, memoryview] = {}
        self._sums = Sums()
        self._tensors: dict[Chunk, Tensor] = {}
        for chunk in chunks:
            self._map_range(chunk.data)
        for key in self.model_keys():
            if not are_exact_cover(self.index.tensors[key].chunks, self.index.tensors[key].shape):
                raise self._unfilled_error(key)

    def arguments(self) -> Mapping[str, Any]:
        if (file := self.folder / "common.pt").is_file():  # before Megatron 0.19
            return arguments_in(load(file))
        return arguments_in(next(self.objects("common_state"), None))

    def common_state(self) -> Mapping[str, Any]:
        """Return what all ranks have in common as plain data; empty before Megatron 0.19."""
        state = next(self.objects("common_state"), None)
        first = state[0] if isinstance(state, list) and state else state
        return first if isinstance(first, Mapping) else {}

    def objects(self, name: str) -> Iterator[Any]:
        """Yield what Megatron keeps beside tensors under a name, a shard at a time, as plain data.

        Raises:
            BadInput: a shard is damaged, or holds objects that are not Megatron's.
        """
        for key, place in sorted(self.index.objects.items()):
            if key.startswith(f"{name}/"):
                part = slice(place.offset, place.offset + place.length)
                yield load(self.folder / place.file, part)

    def _unfilled_error(self, key: str) -> BadInput:
        return BadInput(
            f"{self.folder / METADATA}: the chunks of {key} do not fill the tensor once "
            "each. A rank's file is missing from the checkpoint, or the metadata is damaged."
        )

    def _read_chunk(self, key: str, chunk: Chunk) -> Tensor:
        # A QKV weight is read in a hundred boxes: parsing its archive once halves the time of it.
        if (known := self._tensors.get(chunk)) is not None:
            return known
        where = f"{self.folder / chunk.data.file}: the data of {key} at {list(chunk.offsets)}"
        try:
            view = self._map_range(chunk.data)
            if not view:
                raise BadArchive(".metadata gives it no bytes")
            for end in (view[:ENDS], view[-ENDS:]):
                load_pages(torch.frombuffer(end, dtype=torch.uint8))
            tensor = read_tensor(view, self._sums)
            if self.checks:
                self._sums.check(tensor)
        except BadArchive as error:
            raise BadInput(f"{where} is damaged or of another kind: {error}.") from None
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != self.dtype(key):
            raise BadInput(
                f"{where} is {list(tensor.shape)} {tensor.dtype}, but .metadata says "
                f"{list(chunk.sizes)} {self.dtype(key)}. The files belong to different checkpoints."
            )
        self._tensors[chunk] = tensor
        return tensor

    def _map_range(self, place: FileRange) -> memoryview:
        """Return the bytes of a range, of a file that is mapped once."""
        file = self.folder / place.file
        try:
            mapped = self._mapped.get(place.file) or map_file(file)
        except (OSError, ValueError) as error:
            raise BadInput(
                f"{file} cannot be read ({error}). The checkpoint is incomplete."
            ) from None
        self._mapped[place.file] = mapped
        if place.offset + place.length > len(mapped):
            raise BadInput(
                f"{file} has {len(mapped)} bytes, but .metadata places data up "
                f"to byte {place.offset + place.length}. The file is cut short: copy it again."
            )
        return mapped[place.offset : place.offset + place.length]


def _check_backend(folder: Path) -> None:
    """Raise BadInput unless ``metadata.json`` names the format and the version that are read."""
    file = folder / CHECKPOINT_CONFIG
    try:
        content = parse_json(file.read_bytes())
        backend, version = content.get("sharded_backend"), content.get("sharded_backend_version", 1)
    except FileNotFoundError:
        refuse_other_format(folder)
        raise BadInput(
            f"{folder} is not a Megatron-Core torch_dist checkpoint: it has no metadata.json."
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(
            f"{file} cannot be read ({error!r:.200}). Copy the checkpoint again."
        ) from None
    if backend != "torch_dist" or version != 1:
        raise BadInput(
            f"{file} says the checkpoint's format is {backend!r:.40}, version {version!r:.40}; "
            "only torch_dist, version 1, can be read. Load it in Megatron and save it again "
            "with --ckpt-format torch_dist."
        )


def refuse_other_format(folder: Path) -> None:
    """Raise BadInput if a folder without ``metadata.json`` has another format of Megatron's.

    Its formats of torch's own distributed checkpointing have no such file, and begin the names of
    weights in ``.metadata`` with ``model.`` (``megatron.training.checkpointing``).
    """
    names: Iterable[str] = ()
    with suppress(BadInput):
        names = read_metadata(folder).tensors
    if any(name.startswith("model.") for name in names):
        raise BadInput(
            f"{folder} has the format fsdp_dtensor, which Megatron-FSDP writes, or torch_dcp; only "
            "torch_dist can be read. Of fsdp_dtensor, tools/checkpoint/checkpoint_inspector.py of "
            f"a new Megatron-LM makes it: convert-fsdp-dtensor-to-torch-dist {folder} "
            f"OUT/{folder.name}. Then name OUT/{folder.name}, or train with --load OUT "
            "--ckpt-step N."
        )


class DistcpFile(DirectFile):
    """One ``.distcp`` file being written, tensor after tensor, without keeping data in memory.

    `index` says what it holds.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, create=True)
        self.index = CheckpointIndex()
        self._name = path.name

    def write_row(self, row: Row, dtype: torch.dtype, chunks: Iterable[Tensor]) -> None:
        """Append one row's piece; `chunks` hold its values in order."""
        start = self.tell()
        sizes = (*(1 for _ in row.offset), *row.shape)
        nbytes = row.numel * dtype.itemsize
        write_archive(self, Described(dtype, sizes), [(nbytes, chunks)])
        tensor = self.index.tensors.setdefault(row.key, ChunkedTensor(dtype, row.global_shape))
        corner = (*row.offset, *(0 for _ in row.shape))
        tensor.chunks.append(Chunk(corner, sizes, self._range_since(start)))

    def write_object(self, key: str, content: bytes) -> None:
        start = self.tell()
        self.write(content)
        self.index.objects[key] = self._range_since(start)

    def _range_since(self, start: int) -> FileRange:
        return FileRange(self._name, start, self.tell() - start)


FORMAT = CheckpointFormat(
    name="torch_dist",
    title="the torch_dist format",
    open=lambda folder, architecture: TorchDistCheckpoint(folder),
)


def dumps_metadata(index: CheckpointIndex) -> bytes:
    """Return the content of the ``.metadata`` file for `index`."""
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as dcp

    def storage_info(data: FileRange) -> filesystem._StorageInfo:
        return filesystem._StorageInfo(data.file, data.offset, data.length)

    described: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, filesystem._StorageInfo] = {}
    for key, tensor in index.tensors.items():
        properties = dcp.TensorProperties(dtype=tensor.dtype)
        chunks = []
        for number, chunk in enumerate(tensor.chunks):
            offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
            chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
            storage[dcp.MetadataIndex(key, offsets, number)] = storage_info(chunk.data)
        described[key] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    for key, data in index.objects.items():
        described[key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(key)] = storage_info(data)
    buffer = io.BytesIO()
    MetadataPickler(buffer, protocol=2).dump(dcp.Metadata(described, storage_data=storage))
    return with_checksum(buffer.getvalue())


def read_metadata(folder: Path) -> CheckpointIndex:
    """Read ``folder/.metadata``.

    Raises:
        BadInput: the file is damaged, is not checkpoint metadata, or names a class that does not
            belong there; or `folder` holds a special file.
    """
    refuse_special_files(folder)
    file = folder / METADATA
    try:
        return _index_of(loads_metadata(file.read_bytes()))
    except NotAllowed as error:
        raise refusal_error(file, error) from None
    except FileNotFoundError:
        raise BadInput(f"{file} is missing. Copy the checkpoint again.") from None
    except (OSError, *FAILURES) as error:
        raise BadInput(
            f"{file} is not readable checkpoint metadata ({error!r:.200}). Copy the checkpoint "
            "again."
        ) from None


def _is_record(value: Any, name: str) -> bool:
    return isinstance(value, PickledObject) and type(value).__name__ == name


def _index_of(metadata: Any) -> CheckpointIndex:
    """Make the index of unpickled metadata; raise one of `FAILURES` if they are damaged."""
    if not (_is_record(metadata, "Metadata") or _is_record(metadata, "MCoreMetadata")):
        raise pickle.UnpicklingError("it does not hold a Metadata object")
    ranges = _ranges_in(metadata["storage_data"])
    index = CheckpointIndex()
    for key, described in metadata["state_dict_metadata"].items():
        if _is_record(described, "BytesStorageMetadata"):
            index.objects[key] = ranges[key, None]
        elif _is_record(described, "TensorStorageMetadata"):
            index.tensors[key] = _chunked_tensor(key, described, ranges)
        else:
            raise pickle.UnpicklingError(f"{key} is neither a tensor nor an object")
    return index


def _ranges_in(storage: dict[Any, PickledObject]) -> dict[tuple[str, Shape | None], FileRange]:
    """Return the range of each chunk and object, after checking that no two ranges overlap."""
    ranges: dict[tuple[str, Shape | None], FileRange] = {}
    for at, info in storage.items():
        key, offset = at["fqn"], at.state.get("offset")
        if not isinstance(key, str):
            raise pickle.UnpicklingError("a key that is not text")
        known = ranges.setdefault(
            (key, offset and _require_shape(offset)), file_range := _read_range(info)
        )
        if known is not file_range:
            raise pickle.UnpicklingError(f"{key:.100} is in two places")
    ordered = sorted((r for r in ranges.values() if r.length), key=lambda r: (r.file, r.offset))
    for first, second in pairwise(ordered):
        if first.file == second.file and first.offset + first.length > second.offset:
            raise pickle.UnpicklingError(f"two pieces of data overlap in {first.file}")
    return ranges


def _chunked_tensor(
    key: str, described: PickledObject, ranges: dict[Any, FileRange]
) -> ChunkedTensor:
    """Make the index entry of a tensor, after checking that its chunks lie inside it."""
    dtype = described["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"{key} has no dtype")
    tensor = ChunkedTensor(dtype, _require_shape(described["size"]))
    for chunk in described["chunks"]:
        offsets, sizes = _require_shape(chunk["offsets"]), _require_shape(chunk["sizes"])
        inside = len(offsets) == len(sizes) == len(tensor.shape) and all(
            at + n <= extent for at, n, extent in zip(offsets, sizes, tensor.shape, strict=True)
        )
        if not inside:
            raise pickle.UnpicklingError(f"a chunk of {key} lies outside the tensor")
        tensor.chunks.append(Chunk(offsets, sizes, ranges[key, offsets or None]))
    return tensor


def _read_range(info: PickledObject) -> FileRange:
    """Return where data lie; raise UnpicklingError for a file elsewhere or compressed data."""
    file, offset, length = info["relative_path"], info["offset"], info["length"]
    plain = isinstance(file, str) and file == PurePosixPath(file).name and "\0" not in file
    if not plain or file in ("", "..", "."):
        raise pickle.UnpicklingError(
            f"{file!r:.100} is not a plain file name in the same directory"
        )
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise pickle.UnpicklingError("an offset or length that is not a count")
    if info.state.get("transform_descriptors"):
        raise pickle.UnpicklingError("the data is transformed (compressed); that is not read")
    return FileRange(file, offset, length)


def _require_shape(value: Any) -> Shape:
    if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise pickle.UnpicklingError(f"a {type(value).__name__} that is not a shape")
    return value
