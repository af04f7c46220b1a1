"""Safetensors files beside a checkpoint's weights are read where servers read them, or named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint, unread_files
from mcore_qwen3vl.converters.identify import INDEX
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.unused.folder import unused_of
from tests.converters.checkpoints import assert_same_tensors, copy, load, save

FURTHER = "model-mtp.safetensors"


@pytest.fixture
def parted(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a checkpoint without an index whose `mtp.*` are in a file of their own."""
    path = copy(tiny("hybrid"), tmp_path / "parted")
    tensors = load(path)
    save({n: t for n, t in tensors.items() if not n.startswith("mtp.")}, path)
    further = {n: t for n, t in tensors.items() if n.startswith("mtp.")}
    save_file(further, path / FURTHER, metadata={"format": "pt"})
    return path


def test_mtp_in_a_file_of_its_own_is_read(
    parted: Path, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """vLLM reads every file where there is no index."""
    result = hf_to_mcore(parted, tmp_path / "mcore")
    assert not [note for note in result.notes if "mtp.*" in note]
    assert not unread_files(parted)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert_same_tensors(tiny("hybrid"), tmp_path / "back")


def test_the_same_tensors_twice_are_refused(parted: Path, tiny: Callable[[str], Path]) -> None:
    save(load(tiny("hybrid")), parted)
    with pytest.raises(BadInput, match=r"is in both .*model-mtp.*Files of two checkpoints"):
        HuggingFaceCheckpoint(parted)


def test_other_files_are_named(parted: Path) -> None:
    tensors = load(parted)
    some = {n: t for n, t in tensors.items() if n.startswith("model.visual.")}
    save_file(some, parted / "consolidated.safetensors")
    (parted / "damaged.safetensors").write_bytes(b"not")
    named = {unused.name: unused.why for unused in unread_files(parted)}
    assert named.keys() == {"consolidated.safetensors", "damaged.safetensors"}
    assert "vLLM reads such a file in place of the model" in named["consolidated.safetensors"]
    assert "vLLM, without an index, reads it too" in named["damaged.safetensors"]
    assert named.keys() <= {unused.name for unused in unused_of(parted)}
    assert HuggingFaceCheckpoint(parted).has_mtp
    # vLLM and transformers read no file that an index does not name.
    (parted / "model.safetensors").rename(parted / "model-00001-of-00001.safetensors")
    places = {n: "model-00001-of-00001.safetensors" for n in tensors if not n.startswith("mtp.")}
    (parted / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    named = {unused.name: unused.why for unused in unread_files(parted)}
    assert named[FURTHER] == f"not read: {INDEX} does not name it"
    assert "vLLM reads such a file in place of the model" in named["consolidated.safetensors"]
    assert not HuggingFaceCheckpoint(parted).has_mtp
