"""The launch scripts that commands name are those of the folder, and copies run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.command import exit_code

LAUNCH = Path(__file__).parents[2] / "launch"


def launch(*arguments: str) -> int | str | None:
    return exit_code("launch", *arguments)


def test_launch_list_names_every_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("list") == 0
    printed = capsys.readouterr().out
    scripts = [script for script in LAUNCH.glob("*.sh") if script.stem != "common"]
    configurations = [*LAUNCH.glob("*.yaml")]
    assert (len(scripts), len(configurations)) == (29, 6)
    for script in [*scripts, *configurations]:
        assert script.stem in printed
    assert "Qwen3-VL-8B, full fine-tuning at 8k packed: one node of 8xH100-80GB." in printed


def test_launch_show(capsys: pytest.CaptureFixture[str]) -> None:
    for name, file in {
        "sft_8b": "sft_8b.sh",
        "sft_8b.sh": "sft_8b.sh",
        "sft_qwen3.5_9b": "sft_qwen3.5_9b.sh",
        "grpo_8b": "grpo_8b.yaml",
        "grpo_8b.yaml": "grpo_8b.yaml",
    }.items():
        assert launch("show", name) == 0
        assert capsys.readouterr().out == (LAUNCH / file).read_text()
    assert launch("show", "sft_9b") == 2
    assert "There is no script sft_9b. The scripts are sft_" in capsys.readouterr().err


def test_a_copy_runs_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert launch("copy", str(folder)) == 0
    command = ["bash", str(folder / "sft_2b.sh"), "--dry-run"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{folder}/train.py" in shown.stdout
    assert (folder / "train.py").exists()
    assert (folder / "grpo_8b.yaml").exists()
    assert launch("copy", str(folder)) == 2
    assert "name another one" in capsys.readouterr().err
