"""Each folder of VERL's saves is found, in both of its layouts.

VERL 0.9.1 wrote the files (`make_peers`). Before 0.9 its folders were not in ``model/``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.converters.convert import mcore_to_hf
from mcore_qwen3vl.converters.describe import inspect_path
from mcore_qwen3vl.converters.mcore.paths import TRACKER
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.inference import hf_folder_of
from mcore_qwen3vl.training.checkpoints.resume import from_other_maker
from tests.converters.checkpoints import assert_same_tensors, copy
from tests.converters.peers.test_load import arguments
from tests.converters.peers.test_peers import HERE, MAKERS

SOURCE = HERE / "hf-dense"


def saved_by_verl(root: Path, model: str) -> Path:
    actor = root / "global_step_20" / "actor"
    copy(HERE / "verl-dense" / "model", actor / model)
    (root / TRACKER).write_text("20")
    return actor


@pytest.mark.parametrize("model", ["", "model"])
def test_every_folder_is_understood(tmp_path: Path, model: str) -> None:
    actor = saved_by_verl(tmp_path / "run", model)
    folders = {tmp_path / "run", actor.parent, actor, actor / model, actor / model / "dist_ckpt"}
    for number, folder in enumerate(folders):
        mcore_to_hf(folder, out := tmp_path / f"out{number}")
        assert_same_tensors(SOURCE, out)
        assert inspect_path(folder).maker == MAKERS["verl"]
        assert hf_folder_of(folder, None, "generate") == actor / model / "huggingface"
        found = from_other_maker(arguments(SOURCE, "--load", str(folder)).args)
        assert found is not None
        assert found.folder == actor / model / "dist_ckpt"


@pytest.mark.parametrize("model", ["", "model"])
def test_hugging_face_weights_are_named(tmp_path: Path, model: str) -> None:
    actor = saved_by_verl(tmp_path / "run", model)
    for file in (actor / model / "dist_ckpt").iterdir():
        file.unlink()  # VERL makes the folder all the same
    named = rf"saved by VERL.*: name {actor / model / 'huggingface'}\.$"
    for folder in (tmp_path / "run", actor.parent, actor, actor / model):
        with pytest.raises(BadInput, match=named):
            mcore_to_hf(folder, tmp_path / "out")
        with pytest.raises(BadInput, match=named):
            inspect_path(folder)
