"""NaN and infinite weights are converted bit for bit, and always reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_qwen3vl.cli import main
from mcore_qwen3vl.converters.convert import hf_to_hf, hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.errors import CheckFailed
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint

FUSED = "model.language_model.layers.1.mlp.experts.gate_up_proj"
NORM = "model.visual.merger.norm.weight"
NOTE = f"2 tensors have NaN or infinite values: {FUSED}, {NORM}."


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("damaged") / "hf", moe=True)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors[FUSED][3, 2, 1] = torch.nan
    tensors[NORM][0], tensors[NORM][1] = torch.inf, -torch.inf  # whose sum is NaN
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def test_every_direction_says_so(damaged: Path, tmp_path: Path) -> None:
    assert NOTE in hf_to_mcore(damaged, tmp_path / "mcore").notes
    assert NOTE in mcore_to_hf(tmp_path / "mcore", tmp_path / "back").notes
    assert NOTE in hf_to_hf(damaged, tmp_path / "hf", expert_layout="published").notes
    legacy = hf_to_mcore(damaged, tmp_path / "legacy", format="torch", layout=Layout(tp=2))
    assert NOTE in legacy.notes


def test_a_sound_checkpoint_has_no_note(moe: Path, tmp_path: Path) -> None:
    assert not any("NaN" in note for note in hf_to_mcore(moe, tmp_path / "mcore").notes)


def test_strict_writes_nothing(damaged: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second time from the journal of the first
        with pytest.raises(CheckFailed, match=r"2 tensors have NaN .* Nothing was written"):
            hf_to_mcore(damaged, tmp_path / "mcore", strict=True)
        assert not (tmp_path / "mcore").exists()
    assert NOTE in hf_to_mcore(damaged, tmp_path / "mcore").notes


def test_the_commands(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in (
        (["convert", "hf-to-mcore", str(damaged), str(tmp_path / "mcore")], 0),
        (["convert", "hf-to-mcore", str(damaged), str(tmp_path / "other"), "--strict"], 1),
        (["verify", "roundtrip", str(damaged)], 0),
        (["verify", "roundtrip", str(damaged), "--strict"], 1),
    ):
        with pytest.raises(SystemExit) as left:
            main(words)
        printed = "".join(capsys.readouterr())
        assert left.value.code == code, printed
        assert "2 tensors have NaN or infinite values" in " ".join(printed.split())
