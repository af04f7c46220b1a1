"""A checkpoint that cannot be read is told from one of another format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.checkpoints.damage import find_damage
from mcore_qwen3vl.training.checkpoints.resume import newest_readable_iteration

WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"


def save(folder: Path, name: str) -> None:
    dcp.save({name: torch.ones(4, 2), "iteration": 7}, checkpoint_id=folder, no_dist=True)


def test_a_checkpoint_of_megatron_fsdp_is_not_called_damaged(tmp_path: Path) -> None:
    """No older one is taken in its place either, which would lose steps without a word."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    save(tmp_path / "iter_0000007", f"model.module.{WEIGHT}_w")
    for fallback in (False, True):
        with pytest.raises(BadInput, match=r"has the format fsdp_dtensor, .*--load OUT --ckpt-s"):
            newest_readable_iteration(tmp_path, fallback=fallback)
    save(tmp_path / "killed", WEIGHT)
    marker = tmp_path / "killed" / "metadata.json"
    assert find_damage(tmp_path / "killed") == f"{marker} is missing or empty"
