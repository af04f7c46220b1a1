"""Pickles of metadata name nothing that another version lacks, and may name nothing else."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import TensorProperties

from mcore_qwen3vl.converters import torch_dist, torch_pickle
from mcore_qwen3vl.converters.torch_dist import TorchDistCheckpoint
from mcore_qwen3vl.errors import BadInput
from tests.converters.test_torch_dist import example_index


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
