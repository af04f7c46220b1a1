"""How a run ends that Megatron leaves before it trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mcore_qwen3vl.errors import Unfinished
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.verification.curves import run_rank, train
from tests.training.one_step import step_job


def _leaving_in_the_loading(argv: list[str], output: Path) -> str:
    from megatron.training import checkpointing

    def leave(*args: Any, **named: Any) -> NoReturn:
        sys.exit()

    checkpointing._load_base_checkpoint = leave
    with pytest.raises(Unfinished) as refused:
        run_rank(argv, output)
    return str(refused.value)


@pytest.fixture
def saved(dense: Path, data: Path, tmp_path: Path) -> list[str]:
    """Train and save a run; return its command line, which goes on from there."""
    job = step_job(dense, data, "single")
    flags = ("--save", str(tmp_path / "save"))
    train(job, tmp_path / "first", *flags)
    return [*job.argv, *flags]


def test_a_run_that_megatron_leaves_with_exit_code_0_before_it_trains_is_unfinished(
    saved: list[str], tmp_path: Path
) -> None:
    (said,) = run_layout(_leaving_in_the_loading, 1, saved, tmp_path / "output.txt")
    assert said.startswith("Megatron-Core ended the run in its leave, before it trained")


def test_a_run_that_converts_its_checkpoint_says_so(saved: list[str], tmp_path: Path) -> None:
    flags = ("--ckpt-convert-format", "torch", "--ckpt-convert-save", str(tmp_path / "other"))
    output = tmp_path / "output.txt"
    (code,) = run_layout(run_rank, 1, [*saved, *flags], output)
    assert code == 0
    assert f"converted the checkpoint: {tmp_path / 'other'}" in output.read_text("utf-8")
    assert (tmp_path / "other" / "torch" / "latest_checkpointed_iteration.txt").is_file()
