"""A run that is killed while it saves goes on from its newest checkpoint, under any layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_qwen3vl.converters.identify import TRACKER, read_tracker
from mcore_qwen3vl.converters.torch_dist import read_metadata
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import RanksFailed, run_layout
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.verification import curves
from mcore_qwen3vl.verification.curves import OTHER_LAYOUT, Job, curve_of, train, worst_difference
from tests.writes import kill_at

STEPS, KILLED = 3, "iter_0000002"  # the step whose save is killed
WRITES = (12, 6)
"""Of ranks 0 and 1 in one save, at least: from the position in the data to the tracker."""


@pytest.fixture(scope="module")
def run(dense: Path, data: Path) -> Job:
    return Job(dense, data, Layout.parse("dp2"), steps=STEPS, batch=2)


@pytest.fixture(scope="module")
def begun(run: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return the checkpoints of a run after its first step, and the entries of all its steps."""
    folder = tmp_path_factory.mktemp("begun")
    flags = ("--save", str(folder / "save"), "--save-interval", "1")
    first = train(run, folder / "first", *flags, "--exit-interval", "1")
    shutil.copytree(folder / "save", folder / "copy")
    return folder / "copy", first + train(run, folder / "rest", *flags)


def killed_rank(argv: list[str], output: Path, save: Path, victim: int, number: int) -> None:
    if dist.get_rank() == victim:
        kill_at(save, number, since="iter_")
    curves.run_rank(argv, output)


def kill_while_saving(
    run: Job, layout: str, save: Path, number: int, folder: Path, victim: int = 0
) -> bool:
    """Let a run under `layout` go on; return whether one rank was killed at a write of a save."""
    there = replace(run, layout=Layout.parse(layout))
    argv = [*there.argv, "--save", str(save), "--save-interval", "1"]
    curves.import_for_ranks()
    try:
        run_layout(
            killed_rank, there.layout.world_size, argv, folder / "killed.txt", save, victim, number,
            timeout=120,
        )  # fmt: skip
    except RanksFailed:
        return True
    return False


def go_on(run: Job, layout: str, save: Path, folder: Path) -> list[dict[str, Any]]:
    """Let the run go on to its end, and check that its folder holds what it saved alone."""
    last = replace(run, layout=Layout.parse(layout))
    rest = train(last, folder / "rest", "--save", str(save), "--save-interval", "1")
    for step in range(2, STEPS + 1):
        ranks = sorted(file.name for file in data_state.folder_of(save, step).glob("rank_*.pt"))
        assert ranks == [f"rank_{n:05d}.pt" for n in range(len(ranks))]
        weights = save / f"iter_{step:07d}"
        index = read_metadata(weights)
        named = {chunk.data.file for tensor in index.tensors.values() for chunk in tensor.chunks}
        named |= {found.file for found in index.objects.values()}
        assert {file.name for file in weights.glob("*.distcp")} == named
    assert read_tracker(save) == STEPS
    return rest


def assert_same_run(rest: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    assert rest
    assert [entry["iteration"] for entry in rest] == list(range(STEPS - len(rest) + 1, STEPS + 1))
    difference = worst_difference(curve_of(rest), curve_of(whole[-len(rest) :]))
    assert difference.loss <= OTHER_LAYOUT
    assert difference.grad_norm <= OTHER_LAYOUT


def test_two_saves_killed_under_two_layouts(
    run: Job, begun: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    save = tmp_path / "save"
    shutil.copytree(begun[0], save)
    assert kill_while_saving(run, "dp2", save, 6, tmp_path)
    left = {file.name for file in data_state.folder_of(save, 2).glob("rank_*.pt")}
    assert left == {"rank_00000.pt", "rank_00001.pt"}
    assert kill_while_saving(run, "single", save, 12, tmp_path)
    assert read_tracker(save) == 1
    assert_same_run(go_on(run, "single", save, tmp_path), begun[1])


def test_a_tracker_that_was_emptied_names_the_checkpoint_that_is_whole(
    run: Job, begun: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    save = tmp_path / "save"
    shutil.copytree(begun[0], save)
    (save / TRACKER).write_text("")  # as Megatron leaves it if it is killed before it writes
    (save / KILLED).mkdir()
    (save / KILLED / ".metadata").touch()  # of a save that was killed, too
    rest = go_on(run, "dp2", save, tmp_path)
    assert len(rest) == STEPS - 1
    assert_same_run(rest, begun[1])


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [("dp2", "single", "dp2"), ("single", "dp2", "tp2")])
@pytest.mark.parametrize("victim", [0, 1])
def test_each_write_of_a_save(
    layouts: tuple[str, str, str], victim: int, run: Job,
    begun: tuple[Path, list[dict[str, Any]]], tmp_path: Path,
) -> None:  # fmt: skip
    for number in count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        save = folder / "save"
        shutil.copytree(begun[0], save)
        killed = [
            kill_while_saving(
                run, layout, save, number, folder, min(victim, Layout.parse(layout).world_size - 1)
            )
            for layout in layouts[:2]
        ]
        if not all(killed):  # a save has fewer writes
            break
        if rest := go_on(run, layouts[2], save, folder):  # else only the tracker was to be written
            assert_same_run(rest, begun[1])
    assert number > WRITES[victim]
