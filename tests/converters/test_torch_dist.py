"""A torch_dist checkpoint's archives of tensors, and its metadata, are read and written right."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import TensorProperties

from mcore_qwen3vl.converters import torch_dist, torch_pickle
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.megatron_checkpoint import (
    CheckpointIndex,
    Chunk,
    ChunkedTensor,
    FileRange,
)
from mcore_qwen3vl.converters.storage.archive import (
    STORAGES,
    BadArchive,
    Described,
    dumps,
    read_tensor,
    write_archive,
)
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.torch_dist import TorchDistCheckpoint
from mcore_qwen3vl.errors import BadInput
from tests.converters.checkpoints import Call, load

Tiny = Callable[[str], Path]
WRITTEN = Path(__file__).parent / "torch_dist"
OLD = WRITTEN / "torch-2.11"
"""A checkpoint that torch 2.11 wrote: two tensors, a transposed view and an object."""


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


def example_index() -> CheckpointIndex:
    chunks = [
        Chunk(
            (layer, expert, 0, 0),
            (1, 1, 4, 6),
            FileRange("__0_0.distcp", 9 * layer + 3 * expert, 3),
        )
        for layer in range(2)
        for expert in range(3)
    ]
    return CheckpointIndex(
        {
            "experts": ChunkedTensor(torch.bfloat16, (2, 3, 4, 6), chunks),
            "norm": ChunkedTensor(
                torch.float32, (5,), [Chunk((0,), (5,), FileRange("__1_0.distcp", 9, 4))]
            ),
        },
        {"linear._extra_state/shard_0_1": FileRange("__0_1.distcp", 0, 12)},
    )


def test_metadata_round_trips(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(torch_dist.dumps_metadata(example_index()))
    assert torch_dist.read_metadata(tmp_path) == example_index()
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    experts = theirs.state_dict_metadata["experts"]
    assert experts.size == torch.Size((2, 3, 4, 6))
    assert experts.properties == TensorProperties(dtype=torch.bfloat16)
    assert [tuple(c.offsets) for c in experts.chunks][4] == (1, 1, 0, 0)
    place = theirs.storage_data[dcp.metadata.MetadataIndex("experts", (1, 1, 0, 0))]
    assert (place.relative_path, place.offset, place.length) == ("__0_0.distcp", 12, 3)


def test_metadata_names_nothing_that_torch_2_11_lacks() -> None:
    """It has only classes and fields that torch 2.11's own file (in `OLD`) and source have."""
    names = {
        arg.replace(" ", ".")
        for op, arg, _ in pickletools.genops(torch_dist.dumps_metadata(example_index()))
        if op.name == "GLOBAL"
    }
    module = "torch.distributed.checkpoint.metadata."
    assert names <= {
        f"{module}BytesStorageMetadata",
        f"{module}ChunkStorageMetadata",
        f"{module}Metadata",
        f"{module}MetadataIndex",
        f"{module}TensorProperties",
        f"{module}TensorStorageMetadata",
        f"{module}_MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.Size",
        "torch.bfloat16",
        "torch.float32",
        "torch.serialization._get_layout",
    }
    record = torch_pickle.loads_metadata(torch_dist.dumps_metadata(example_index()))
    fields = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    assert set(record.state) <= fields
    assert len(record["state_dict_metadata"]["norm"]["properties"].state) == 5


def test_reading_what_torch_2_11_wrote() -> None:
    checkpoint = TorchDistCheckpoint(OLD)
    expected = {
        "decoder.layers.mlp.weight": torch.arange(24.0).reshape(2, 3, 4).bfloat16(),
        "embedding.word_embeddings.weight": torch.arange(10.0).reshape(5, 2),
        "view": torch.arange(12.0).reshape(3, 4).T,
    }
    assert set(checkpoint.index.tensors) == set(expected)
    assert set(checkpoint.index.objects) == {"decoder.layers.mlp._extra_state/shard_0_1"}
    for key, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(key), tensor)


def test_reading_what_megatron_0_15_wrote() -> None:
    """Its metadata is of a class of its own, with torch's fields and one more."""
    checkpoint = TorchDistCheckpoint(WRITTEN / "megatron-0.15")
    assert torch.equal(checkpoint.tensor("a"), torch.arange(12.0).reshape(3, 4))
    assert set(checkpoint.index.tensors) == {"a"}


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore torch's own reading and writing, whatever was called before."""
    monkeypatch.setattr(filesystem, "pickle", pickle)
    get_state, set_state = torch_pickle._own_state_methods()
    monkeypatch.setattr(TensorProperties, "__getstate__", get_state)
    monkeypatch.setattr(TensorProperties, "__setstate__", set_state)
    if hasattr(TensorProperties, "strides"):
        monkeypatch.setattr(TensorProperties, "strides", None)


def test_fields_of_a_newer_torch_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unguarded: None
) -> None:
    """torch 2.15 stores a sixth field, which our reader ignores, and torch's when guarded.

    Without the guard, an older torch cannot read it, and megatron-core 0.19 cannot use it.
    """
    fields = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda p: (*fields(p)[:5], (4, 1)))
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(2).bfloat16()}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    checkpoint = TorchDistCheckpoint(tmp_path)
    torch_pickle.guard_reads()
    described = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for key, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(key), tensor)
        properties = described[key].properties
        made = torch.empty(described[key].size, **vars(properties), device="meta")  # like Megatron
        assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
        assert len(properties.__getstate__()) == 5
        assert properties == TensorProperties.create_from_tensor(tensor)


def test_torchs_writer_adds_a_checksum_which_both_readers_check(
    tmp_path: Path, unguarded: None
) -> None:
    torch_pickle.guard_reads()
    dcp.save({"a": torch.randn(3, 4)}, checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / ".metadata"
    written = file.read_bytes()
    assert set(torch_dist.read_metadata(tmp_path).tensors) == {"a"}
    assert set(dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == {"a"}
    assert set(pickle.loads(written).state_dict_metadata) == {"a"}  # as others read it
    for at in range(0, len(written), 16):
        file.write_bytes(written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :])
        if torch_pickle._MARK in file.read_bytes():
            with pytest.raises(BadInput, match=r"other bytes than were saved"):
                torch_dist.read_metadata(tmp_path)
            with pytest.raises(pickle.UnpicklingError, match=r"other bytes than were saved"):
                dcp.FileSystemReader(tmp_path).read_metadata()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_as_any_python_writes_it(module: str, unguarded: None) -> None:
    """It is read: torch stores a folder's path, which Python 3.13 pickles under another module."""
    stored = f"c{module}\nPosixPath\n(Va\nVb\ntR.".encode()
    torch_pickle.loads_metadata(stored)
    torch_pickle.guard_reads()
    assert filesystem.pickle.load(io.BytesIO(stored)) == Path("a/b")


def test_torch_reads_our_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    """torch reads it with its own reader, without Megatron or this project."""
    hf_to_mcore(tiny("moe"), tmp_path / "mcore")
    folder = tmp_path / "mcore" / "release"
    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.full(meta.size, torch.nan, dtype=meta.properties.dtype)
        for key, meta in described.items()
        if hasattr(meta, "size")
    }
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    reader = dcp.FileSystemReader(folder)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert not any(tensor.isnan().any() for tensor in state.values())
    hf = load(tiny("moe"))
    visual = [key for key in state if key.startswith("visual.")]
    assert len(visual) > 50
    for key in visual:
        assert torch.equal(state[key], hf[f"model.{key}"])


@pytest.mark.parametrize(
    "function",
    [eval, exec, getattr, Path.unlink, torch.load, torch.save, io.open, type, pickle.loads],
    ids=lambda f: f.__name__,
)
def test_hostile_metadata_never_runs(tmp_path: Path, function: Any) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(function, victim)))
    with pytest.raises(BadInput, match="which has no place in a checkpoint"):
        torch_dist.read_metadata(tmp_path)
    assert victim.exists()


def test_metadata_must_not_reach_outside(tmp_path: Path) -> None:
    index = example_index()
    index.objects["x"] = FileRange("../../etc/passwd", 0, 10)
    (tmp_path / ".metadata").write_bytes(torch_dist.dumps_metadata(index))
    with pytest.raises(BadInput, match="not a plain file name in the same directory"):
        torch_dist.read_metadata(tmp_path)
