"""A torch_dist checkpoint's metadata and tensors are read and written right."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from mcore_qwen3vl.converters import torch_dist
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.megatron_checkpoint import (
    CheckpointIndex,
    Chunk,
    ChunkedTensor,
    FileRange,
)
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.torch_dist import TorchDistCheckpoint
from mcore_qwen3vl.errors import BadInput
from tests.converters.checkpoints import Call, load

Tiny = Callable[[str], Path]
WRITTEN = Path(__file__).parent / "torch_dist"
OLD = WRITTEN / "torch-2.11"
"""A checkpoint that torch 2.11 wrote: two tensors, a transposed view and an object."""


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


def index(*chunks: tuple[Shape, FileRange]) -> CheckpointIndex:
    stored = [Chunk(offsets, (2, 3), place) for offsets, place in chunks]
    return CheckpointIndex({"w": ChunkedTensor(torch.float32, (4, 3), stored)}, {})


A, B = FileRange("__0_0.distcp", 0, 10), FileRange("__0_0.distcp", 10, 10)


Damage = Callable[[], CheckpointIndex]


DAMAGES: dict[str, tuple[Damage, str]] = {
    "shared bytes": (lambda: index(((0, 0), A), ((2, 0), replace(B, offset=9))), "overlap"),
    "one place for two": (lambda: index(((0, 0), A), ((2, 0), A)), "overlap"),
    "a hole": (lambda: index(((0, 0), A)), "do not fill the tensor once"),
    "a hole and an overlap": (lambda: index(((0, 0), A), ((1, 0), B)), "do not fill the tensor"),
    "outside": (lambda: index(((0, 0), A), ((3, 0), B)), "lies outside the tensor"),
    "one corner twice": (lambda: index(((0, 0), A), ((0, 0), B)), "do not fill the tensor"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_metadata(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "__0_0.distcp").write_bytes(bytes(20))
    (tmp_path / ".metadata").write_bytes(torch_dist.dumps_metadata(index(((0, 0), A), ((2, 0), B))))
    TorchDistCheckpoint(tmp_path)
    (tmp_path / ".metadata").write_bytes(torch_dist.dumps_metadata(damage()))
    with pytest.raises(BadInput, match=message):
        TorchDistCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (
            "model.module.",
            r"has the format fsdp_dtensor, .*convert-fsdp-dtensor-to-torch-dist \S+ ",
        ),
        ("", r"is not a Megatron-Core torch_dist checkpoint"),
    ],
)
def test_a_checkpoint_of_megatron_fsdp_is_named(prefix: str, said: str, tmp_path: Path) -> None:
    """Its weights are those that Megatron-FSDP saves; those of a killed save are torch_dist's."""
    names = ("decoder.layers.0.mlp.linear_fc1.weight_w", "decoder.layers.0.mlp.linear_fc1.weight_v")
    state = {f"{prefix}{name}": torch.ones(4, 2) for name in names}
    dcp.save({**state, "iteration": 7}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(BadInput, match=said):
        TorchDistCheckpoint(tmp_path)
