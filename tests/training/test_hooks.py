"""What is woven into Megatron's loop besides our own steps."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training.hooks import gather_items
from mcore_qwen3vl.training.run import Run
from mcore_qwen3vl.verify.curves.curve import curve_of, worst_difference
from mcore_qwen3vl.verify.curves.job import Job, train


def _signals() -> tuple[list[int], list[int]]:
    from megatron.training import dist_signal_handler

    here = int(dist.get_rank() == 1)
    return gather_items(None, here, dtype=torch.int32), dist_signal_handler.all_gather_item(
        here, dtype=torch.int32
    )


def test_a_signal_of_one_rank_reaches_all_as_megatrons_own_gather_tells_them() -> None:
    for ours, megatrons in run_layout(_signals, 3):
        assert ours == megatrons == [0, 1, 0]


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_stops_the_run(norm: float) -> None:
    run = Run.__new__(Run)
    run.args = Namespace(fp16=False)
    with pytest.raises(FloatingPointError, match=r"norm of iteration 7 is (nan|inf)\. No check"):
        run._check_norm(norm, 7)
    for fine in (None, 0.0, 1e9):
        run._check_norm(fine, 7)
    run.args.fp16 = True  # the loss scaler skips the step
    run._check_norm(norm, 7)


def test_a_poisoned_step_is_not_saved(dense: Path, data: Path, tmp_path: Path) -> None:
    """As the launch scripts run, without Megatron's check of every bucket."""
    from mcore_qwen3vl.runtime.launch import RanksFailed

    job = Job(dense, data, steps=2, flags=("--lr", "1e30", "--no-check-for-nan-in-loss-and-grad"))
    save = tmp_path / "save"
    with pytest.raises(RanksFailed, match="The gradient norm of iteration 2 is nan"):
        train(job, tmp_path / "run", "--save", str(save), "--save-interval", "100")
    assert not (save / "latest_checkpointed_iteration.txt").exists()


def test_batches_padded_to_their_longest_sample_cross_pipeline_stages(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    """Stages that transfer --seq-length tokens would fail or hang on a shorter batch."""
    flags = ("--pad-to-longest",)
    alone = train(Job(dense, data, steps=2, flags=flags), tmp_path / "alone")
    # All DeepStack layers on the first stage: otherwise lengths vary anyhow.
    split = (*flags, "--decoder-first-pipeline-num-layers", "3")
    staged = Job(dense, data, Layout.parse("pp2"), steps=2, flags=split)
    found = worst_difference(curve_of(train(staged, tmp_path / "pp2", timeout=60)), curve_of(alone))
    assert found.loss < 1e-4
    assert found.grad_norm < 1e-4
