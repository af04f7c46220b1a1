"""Commands leave no process, temporary file or shared memory behind, however they end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import write_image_qa
from tests.leftovers import run_and_end

CLI = (sys.executable, "-c", "from mcore_qwen3vl.cli import main; main()")
TWO_RANKS = ("--cpu", "--tp", "2")


@dataclass(frozen=True)
class Files:
    """The files that commands read, and the folder they write."""

    model: Path
    data: Path
    out: Path

    @property
    def log(self) -> Path:
        return self.out / "log.jsonl"


def ranks_work(_: Files, temporary: Path) -> bool:
    """Return whether the ranks have met, through the file that `run_layout` gives them."""
    return any(file.stat().st_size for file in temporary.glob("*-ranks-*/store"))


@dataclass(frozen=True)
class Command:
    """A long command, and flags that make it short.

    Attributes:
        words: a function that makes its words from the files.
        processes: the number of processes at work, its own included.
        short: words added where it is to succeed.
        working: whether its processes are at work, given the files and its temporary folder.
    """

    words: Callable[[Files], list[object]]
    processes: int
    short: tuple[object, ...] = ()
    working: Callable[[Files, Path], bool] = ranks_work


def two_steps(files: Files, _: Path) -> bool:
    return files.log.exists() and files.log.read_text().count("\n") >= 2


def a_role_works(_: Files, temporary: Path) -> bool:
    progress = temporary.glob("*-rehearsal-*/progress")
    return any(file.read_text().count("\n") > 1 for file in progress)


def training(files: Files) -> list[object]:
    return [
        "train", "--cpu", "--hf-model", files.model, "--load-hf", files.model,
        "--data-path", files.data, "--seq-length", 256, "--micro-batch-size", 1,
        "--global-batch-size", 2, "--lr", "1e-3", "--train-iters", 100_000,
        "--save", files.out / "save", "--save-interval", 2,
        "--log-interval", 1, "--log-json", files.log, "--num-workers", 1,
    ]  # fmt: skip


def rehearsal(files: Files) -> list[object]:
    return [
        "rehearse", "--gpu", "h200", "--gpus", 2, "--hf-model", files.model,
        "--data-path", files.data, "--seq-length", 256, "--micro-batch-size", 1,
        "--global-batch-size", 2, "--pipeline-model-parallel-size", 2,
    ]  # fmt: skip


def generation(files: Files) -> list[object]:
    return ["generate", files.model, *TWO_RANKS, "--prompt", "What?", "--max-new-tokens", 4_000]


def checking(files: Files) -> list[object]:
    hook = files.out / "slow.py"
    hook.write_text(
        "import pathlib, time\n\n\ndef slow(record):\n"
        f"    pathlib.Path({str(files.log)!r}).touch()\n    time.sleep(0.1)\n    return record\n"
    )
    return [
        "data", "check", files.data, "--hf-model", files.model, "--workers", 2,
        "--preprocess", f"{hook}:slow",
    ]  # fmt: skip


def scoring(files: Files) -> list[object]:
    out = files.out / "scores.jsonl"
    return ["score", files.model, files.data, *TWO_RANKS, "--packing-buffer", 1, "--out", out]


COMMANDS = {
    "rehearse": Command(rehearsal, 3, ("--roles", "first"), a_role_works),
    "train --cpu": Command(training, 2, ("--train-iters", 4), two_steps),
    "train --processes 2": Command(
        lambda files: [*training(files), "--processes", 2], 5, ("--train-iters", 4), two_steps
    ),
    "verify parity": Command(
        lambda files: ["verify", "parity", files.model, "--tp", 2], 3, ("--batches", "images")
    ),
    "data check": Command(checking, 3, ("--limit", 3), lambda files, _: files.log.exists()),
    "score": Command(scoring, 3, ("--packing-buffer", 128)),
    "generate": Command(generation, 3, ("--max-new-tokens", 2)),
}


@pytest.fixture(scope="module")
def model_and_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("leftovers")
    return write_tiny_checkpoint(folder / "model"), write_image_qa(folder / "data", 200)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["success", "Ctrl-C", "SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_left(
    name: str, ending: str, model_and_data: tuple[Path, Path], tmp_path: Path
) -> None:
    command, files = COMMANDS[name], Files(*model_and_data, tmp_path)
    words = [*CLI, *command.words(files), *(command.short if ending == "success" else ())]
    left = run_and_end(
        words,
        tmp_path,
        ending,
        processes=command.processes,
        ready=lambda temporary: command.working(files, temporary),
    )
    assert (left.exit_code == 0) == (ending == "success"), left.printed
    assert left.anything == [], left.printed
