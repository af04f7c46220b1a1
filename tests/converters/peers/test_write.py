"""Checkpoints in another project's dialect are those that its own converter writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.torch_dist.files import TorchDistCheckpoint
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verify.checkpoints import check_manifest, compare_checkpoints
from tests.converters.checkpoints import assert_same_files, assert_same_tensors, edit_config
from tests.converters.peers.test_peers import HERE, MAKERS, PEERS, source_of


@pytest.mark.parametrize("peer", PEERS)
def test_it_holds_what_the_peers_own_holds(tmp_path: Path, peer: str) -> None:
    maker, source, out = peer.rpartition("-")[0], source_of(peer), tmp_path / "out"
    hf_to_mcore(source, out, dialect=maker)
    ours, theirs = TorchDistCheckpoint(out), TorchDistCheckpoint(HERE / peer)
    assert ours.index.tensors.keys() == theirs.index.tensors.keys()
    for key, tensor in theirs.index.tensors.items():
        assert ours.index.tensors[key].shape == tensor.shape, key
        assert ours.dtype(key) == tensor.dtype, key
        assert torch.equal(ours.tensor(key), theirs.tensor(key)), key
    assert ours.index.objects.keys() == theirs.index.objects.keys()
    assert ours.folder.name == {"megatron-bridge": "release", "ms-swift": "iter_0000001"}[maker]
    arguments = dist_checkpointing.load_common_state_dict(str(ours.folder))["args"]
    assert (arguments.tensor_model_parallel_size, arguments.no_save_optim) == (1, True)
    mcore_to_hf(out, tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    assert_same_files(source, tmp_path / "back")
    assert check_manifest(out).ok
    report = compare_checkpoints(out, HERE / peer)
    assert report.ok
    said = [who for name, who in report.environment.items() if name.endswith("written by")]
    assert said == [MAKERS[maker]] * 2


def test_only_a_language_model_in_torch_dist_has_a_dialect(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "hf")
    edit_config(source, architectures=None)
    with pytest.raises(BadInput, match="--dialect ms-swift is written in the torch_dist format"):
        hf_to_mcore(source, tmp_path / "out", dialect="ms-swift", format="torch")
    with pytest.raises(
        BadInput, match="dialect 'x' is not known: megatron-bridge and ms-swift can"
    ):
        hf_to_mcore(source, tmp_path / "out", dialect="x")
    assert not (tmp_path / "out").exists()
