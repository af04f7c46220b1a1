"""What a refusal says and leaves, what a checkpoint records, and how an earlier version goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.contract import resuming
from mcore_qwen3vl.training.contract.record import FILE
from mcore_qwen3vl.training.contract.resuming import Contract
from mcore_qwen3vl.verification.curves import Job, train
from tests.training.contract.conftest import record
from tests.training.log import numbers_of

STEPS, HALF = 4, 2
SCHEDULE = (
    *("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "2", "--lr-wsd-decay-style", "linear"),
    *("--lr", "1e-3", "--min-lr", "1e-4"),
)


@pytest.fixture(scope="module")
def stopped(
    dense: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Job, Path, list[dict[str, Any]]]:
    """Return a run, its folder, in which it was stopped halfway, and the log of all of it."""
    folder = tmp_path_factory.mktemp("stopped")
    job = Job(dense, data, steps=STEPS, batch=2, flags=SCHEDULE)
    whole = train(job, folder / "whole")
    train(job, folder / "half", "--save", str(folder / "save"), "--exit-interval", str(HALF))
    return job, folder / "save", whole


def test_a_refusal_names_all_that_differs_and_writes_nothing(
    stopped: tuple[Job, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    before = {file: file.stat().st_mtime_ns for file in stopped[1].rglob("*") if file.is_file()}
    flags = ("--load", str(stopped[1]), "--seed", "7", "--lr", "5e-4")
    said = r"--seed 1234, and .* --seed 7: .*--lr 0.001, and .* --lr 0.0005. .* begin a new run"
    with pytest.raises(BadInput, match=said):
        train(stopped[0], tmp_path / "refused", *flags)
    assert before == {file: file.stat().st_mtime_ns for file in before}
    new = ("--seed", "7", "--lr", "5e-4", "--finetune", "--save", str(tmp_path / "new"))
    rest = train(stopped[0], tmp_path / "new run", "--load", str(stopped[1]), *new)
    assert [entry["iteration"] for entry in rest] == list(range(1, STEPS + 1))


def test_a_checkpoint_without_a_record_goes_on_and_says_what_is_not_compared(
    stopped: tuple[Job, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    shutil.copytree(stopped[1], tmp_path / "old")
    (data_state.folder_of(tmp_path / "old", HALF) / FILE).unlink()
    flags = ("--load", str(tmp_path / "old"))
    rest = train(stopped[0], tmp_path / "rest", *flags)
    assert numbers_of(rest) == numbers_of(stopped[2][HALF:])
    said = (tmp_path / "rest" / "output.txt").read_text()
    assert "of an earlier version, and does not say all of data sets, mixture" in said
    with pytest.raises(BadInput, match=r"--lr 0.001, and this command --lr 0.0005. Add --override"):
        train(stopped[0], tmp_path / "refused", *flags, "--lr", "5e-4")


@pytest.mark.parametrize("no_load_optim", [False, True])
def test_a_checkpoint_records_the_schedule_that_holds(
    no_load_optim: bool, dense: Path, folder: Path, tmp_path: Path
) -> None:
    """Otherwise the next run compares with lengths that no rate was computed from."""
    before, now = (record(dense, folder, f"--train-iters {n}") for n in (3, 9))
    before.write(tmp_path, 3)
    args: Any = SimpleNamespace(
        use_checkpoint_opt_param_scheduler=True, no_load_optim=no_load_optim
    )
    settings: Any = SimpleNamespace(checkpoints=SimpleNamespace(load=str(tmp_path)))
    contract = Contract(args, settings, print)
    contract.record = now
    contract._compare_recorded(3)
    kept = now if no_load_optim else before
    assert contract.in_effect.rows["schedule"] == kept.rows["schedule"]
    assert contract.in_effect.rows["length of the run"] == now.rows["length of the run"]


@pytest.mark.parametrize("flaw", [BadInput("names code"), OSError("stale file handle")])
def test_data_that_the_first_rank_cannot_read_end_all_ranks(
    flaw: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for its answer, also where a run begins."""
    answers: list[Any] = []
    monkeypatch.setattr(resuming.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        resuming.dist, "broadcast_object_list", lambda found, src: answers.extend(found)
    )
    monkeypatch.setattr(resuming, "record_of", Mock(side_effect=flaw))
    settings: Any = SimpleNamespace(
        checkpoints=SimpleNamespace(load=None, save="run"), loop=SimpleNamespace(skip_train=False)
    )
    with pytest.raises(BadInput, match=str(flaw)):
        Contract(SimpleNamespace(), settings, print).check(None)  # type: ignore[arg-type]
    assert [type(answer) for answer in answers] == [BadInput]
