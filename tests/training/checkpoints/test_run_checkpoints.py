"""A run saves, keeps and exports the checkpoints that it is asked to, also on a full disk."""

from __future__ import annotations

import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from mcore_qwen3vl.converters.convert import mcore_to_hf
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.training.checkpoints.run_checkpoints import explain_save_errors
from mcore_qwen3vl.verification import curves
from mcore_qwen3vl.verification.curves import Job, train


@pytest.fixture
def job(dense: Path, tmp_path: Path) -> Job:
    """Return a job that trains and validates on one record, so that validations are comparable."""
    data = write_image_qa(tmp_path / "one", 1)
    flags = (
        "--valid-data-path", str(data), "--eval-iters", "1", "--eval-interval", "2",
        "--save", str(tmp_path / "save"), "--save-interval", "4", "--keep-best",
    )  # fmt: skip
    return Job(dense, data, steps=10, batch=1, seq_length=256, flags=flags)


def saved(folder: Path) -> tuple[set[int], dict[str, Any]]:
    """Return the iterations of the checkpoints, and the record of the validations."""
    names = {path.name for path in folder.glob("iter_*")}
    assert {path.name for path in (folder / "dataloader").iterdir()} == names
    return {int(name[5:]) for name in names}, json.loads((folder / "validation.json").read_text())


@pytest.mark.slow
def test_a_run_without_improvement_stops_and_goes_on_with_more_patience(
    job: Job, tmp_path: Path
) -> None:
    """Both of two pipeline stages stop, though only the last has the loss."""
    save, hf = tmp_path / "save", tmp_path / "hf"
    stuck = ("--lr", "0", "--early-stop-patience", "2", "--save-hf", str(hf))
    job = replace(job, layout=Layout(pp=2), flags=(*job.flags, *stuck))
    train(job, tmp_path / "part", "--exit-interval", "3")
    assert saved(save)[1]["best"][0] == 2
    rest = train(job, tmp_path / "rest")
    assert [entry["iteration"] for entry in rest] == [4, 5, 6]
    text = (tmp_path / "rest" / "output.txt").read_text()
    assert "stopped early after step 6: best validation loss " in text
    kept, known = saved(save)
    assert kept == {2, 3, 4, 6}
    assert [iteration for iteration, _ in known["losses"]] == [2, 4, 6]
    assert len({loss for _, loss in known["losses"]}) == 1
    assert [path.name for path in hf.glob("iter_*")] == ["iter_0000006"]

    assert train(job, tmp_path / "again") == []
    assert saved(save) == (kept, known)
    more = train(job, tmp_path / "more", "--early-stop-patience", "3")
    assert [entry["iteration"] for entry in more] == [7, 8]


def test_the_best_replaces_the_best_before_it(job: Job, tmp_path: Path) -> None:
    train(job, tmp_path / "run")
    kept, known = saved(tmp_path / "save")
    losses = [loss for _, loss in known["losses"]]
    assert losses == sorted(losses, reverse=True)
    assert known["best"] == [10, losses[-1]]
    assert kept == {4, 8, 10}  # 2 and 6 were replaced: no interval saves them


@pytest.mark.parametrize("change", ["data", "samples", "reading", "nothing"])
def test_losses_of_another_validation_are_not_compared(
    job: Job, tmp_path: Path, change: str
) -> None:
    """A step is the best of those that were validated alike, and an older best one stays."""
    train(replace(job, steps=4), tmp_path / "part", "--exit-interval", "2")
    best = saved(tmp_path / "save")[1]["best"]
    assert best[0] == 2
    harder = write_image_qa(tmp_path / "harder", 3, seed=1)
    flags = {
        "data": ("--valid-data-path", str(harder)),
        "samples": ("--valid-data-path", str(harder), "--eval-iters", "2"),
        "reading": ("--image-max-pixels", "1024"),
        "nothing": ("--clip-grad", "0.5"),
    }
    train(replace(job, steps=4), tmp_path / "rest", *flags[change])
    said = (tmp_path / "rest" / "output.txt").read_text()
    kept, known = saved(tmp_path / "save")
    steps = [iteration for iteration, _ in known["losses"]]
    if change == "nothing":
        assert steps == [2, 4]
        assert "are counted from here on" not in said
    else:
        assert steps == [4]
        assert known["best"][0] == 4
        assert kept == {2, 4}
        assert "validations up to step 2 had other data or settings" in said


def test_a_removed_checkpoint_takes_its_data_state_with_it(job: Job, tmp_path: Path) -> None:
    """Megatron removes the checkpoints between those that `--save-retain-interval` keeps."""
    save = tmp_path / "save"
    flags = ("--save", str(save), "--save-interval", "1", "--save-retain-interval", "2")
    train(replace(job, steps=5, flags=flags), tmp_path / "run")
    for folder in (save, save / "dataloader"):
        names = {path.name for path in folder.glob("iter_*")}
        assert names == {"iter_0000002", "iter_0000004", "iter_0000005"}


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
def test_exports_that_a_killed_run_began_are_made_and_the_best_step_is_one(
    job: Job, tmp_path: Path
) -> None:
    save, hf = tmp_path / "save", tmp_path / "hf"
    # A rate at which the loss rises, so that the best step is not the last.
    exports = ("--lr", "0.5", "--save-hf", str(hf), "--save-hf-interval", "2")
    job = replace(job, steps=6, flags=(*job.flags, *exports))
    train(job, tmp_path / "part", "--exit-interval", "4")
    shutil.rmtree(hf / "iter_0000004")
    for left in (".iter_0000003.incomplete", ".iter_0000004.incomplete", ".best.incomplete"):
        (hf / left / "tree").mkdir(parents=True)
    (save / ".hf.1.tmp").mkdir()
    train(job, tmp_path / "rest")
    said = (tmp_path / "rest" / "output.txt").read_text()
    assert "the export of step 3 was interrupted, and this run does not make it" in said
    assert not [place for folder in (save, hf) for place in folder.glob(".*.*")]
    names = sorted(place.name for place in hf.iterdir() if place.name != ".run")
    assert names == ["best", "iter_0000002", "iter_0000004", "iter_0000006"]
    mcore_to_hf(save / "iter_0000004", tmp_path / "four")
    assert_close(weights(hf / "iter_0000004"), weights(tmp_path / "four"), rtol=0, atol=0)
    best = saved(save)[1]["best"][0]
    assert best < 6
    assert f"after step {best}, kept in {save}, exported to {hf}/best" in said
    mcore_to_hf(save / f"iter_{best:07d}", tmp_path / "best")
    assert_close(weights(hf / "best"), weights(tmp_path / "best"), rtol=0, atol=0)


ROOM = 700_000  # bytes a file may have; a rank writes two million


def rank_without_room(*args: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
    curves.run_rank(*args)


@pytest.mark.slow
def test_the_checkpoint_before_is_kept_and_the_message_says_how_to_go_on(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    save = tmp_path / "save"
    flags = ("--save", str(save), "--save-interval", "1")
    job = Job(dense, data, Layout.parse("dp2"), steps=2, batch=2, seq_length=256, flags=flags)
    train(job, tmp_path / "first", "--exit-interval", "1")
    before = {file for file in save.rglob("*") if "logs" not in file.parts}
    output = tmp_path / "output.txt"
    said = rf"Step 2 could not be saved to {save}: File too large\. The checkpoint of step 1 is"
    with pytest.raises(BadInput, match=said):
        run_layout(rank_without_room, 2, job.argv, output, timeout=300)
    assert {file for file in save.rglob("*") if "logs" not in file.parts} == before
    (entry,) = train(job, tmp_path / "again")
    assert entry["iteration"] == 2


def test_another_failure_is_raised_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), explain_save_errors(str(tmp_path), 1):
        raise ZeroDivisionError
