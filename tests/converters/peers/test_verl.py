"""Each folder of VERL's saves is found, in both of its layouts.

The weights are Megatron-Bridge's, through which VERL saves; the folders are those of
``MegatronCheckpointManager`` of VERL 0.9.1 (``model/``) and of its older layout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.convert import mcore_to_hf
from mcore_qwen3vl.converters.describe.inspect import inspect_path
from mcore_qwen3vl.converters.mcore.paths import TRACKER
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.inference import hf_folder_of
from mcore_qwen3vl.training.checkpoints.resume import from_other_maker
from tests.converters.checkpoints import assert_same_tensors, copy
from tests.converters.peers.test_load import arguments
from tests.converters.peers.test_peers import HERE

SOURCE = HERE / "hf-dense"


def saved_by_verl(root: Path, model: str) -> Path:
    actor = root / "global_step_20" / "actor"
    weights = actor / model
    shutil.copytree(HERE / "megatron-bridge-dense" / "iter_0000000", weights / "dist_ckpt")
    copy(SOURCE, weights / "huggingface")
    (weights / "huggingface" / "model.safetensors").unlink()
    (root / TRACKER).write_text("20")
    return actor


@pytest.mark.parametrize("model", ["", "model"])
def test_every_folder_is_understood(tmp_path: Path, model: str) -> None:
    actor = saved_by_verl(tmp_path / "run", model)
    folders = {tmp_path / "run", actor.parent, actor, actor / model, actor / model / "dist_ckpt"}
    for number, folder in enumerate(folders):
        mcore_to_hf(folder, out := tmp_path / f"out{number}")
        assert_same_tensors(SOURCE, out)
        assert inspect_path(folder).maker == "NVIDIA Megatron-Bridge, or VERL with it"
        assert hf_folder_of(folder, None, "generate") == actor / model / "huggingface"
        found = from_other_maker(arguments(SOURCE, "--load", str(folder)).args)
        assert found is not None
        assert found.folder == actor / model / "dist_ckpt"


@pytest.mark.parametrize("model", ["", "model"])
def test_hugging_face_weights_are_named(tmp_path: Path, model: str) -> None:
    actor = saved_by_verl(tmp_path / "run", model)
    shutil.rmtree(actor / model / "dist_ckpt")
    for folder in (actor.parent, actor):
        with pytest.raises(
            BadInput, match=rf"saved by VERL.*: name {actor / model / 'huggingface'}"
        ):
            mcore_to_hf(folder, tmp_path / "out")
