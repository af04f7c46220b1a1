"""A run that is refused before its first step leaves no file or folder behind."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.folders import log_file, nothing_left
from mcore_qwen3vl.verify.job import Job, train


def test_a_run_that_is_refused_after_megatron_has_begun_to_log(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    places = {"--save": "a/run", "--save-hf": "hf", "--tensorboard-dir": "board"}
    flags = [word for flag, name in places.items() for word in (flag, str(tmp_path / name))]
    run = Job(dense, data, Layout(), steps=1)
    with pytest.raises(BadInput, match="nothing_matches selects no parameter"):
        train(run, tmp_path / "output", *flags, "--freeze", "nothing_matches")
    assert [place.name for place in tmp_path.iterdir() if place.is_dir()] == ["output"]


def test_only_a_refused_runs_own_files_go_and_none_once_it_has_begun(tmp_path: Path) -> None:
    save, board = tmp_path / "run", tmp_path / "board"
    command = CommandLine(["--save", str(save), "--tensorboard-dir", str(board)])
    other = board / "events.out.tfevents.1.host.1.0"

    def refuse(begun: bool) -> None:
        with suppress(BadInput), nothing_left(command, lambda: begun):
            for file in (
                log_file(save, 0),
                board / f"events.out.tfevents.1.host.{os.getpid()}.0",
                other,
            ):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
            raise BadInput("no")

    refuse(begun=False)
    assert not save.exists()
    assert list(board.iterdir()) == [other]
    refuse(begun=True)
    assert log_file(save, 0).exists()
    refuse(begun=False)  # the log was there before
    assert log_file(save, 0).exists()
