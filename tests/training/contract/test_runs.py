"""Runs that are stopped, changed and go on do what the contract's table says."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.contract.record import FILE
from mcore_qwen3vl.verification.curves import Job, train
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


def go_on(
    stopped: tuple[Job, Path, list[dict[str, Any]]], folder: Path, *flags: str
) -> tuple[list[dict[str, Any]], str]:
    """Let a copy of the stopped run go on with further flags; return its log and its output."""
    shutil.copytree(stopped[1], folder / "save")
    rest = train(stopped[0], folder, "--save", str(folder / "save"), *flags)
    return rest, (folder / "output.txt").read_text()


def test_the_checkpoints_rates_hold_in_every_step(
    stopped: tuple[Job, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    other = ("--lr", "5e-4", "--min-lr", "0", "--weight-decay", "0.5", "--adam-beta1", "0.5")
    other += ("--lr-wsd-decay-iters", "3", "--use-checkpoint-opt-param-scheduler")
    rest, _ = go_on(stopped, tmp_path, *other)
    assert numbers_of(rest) == numbers_of(stopped[2][HALF:])


def test_the_commands_rates_hold_from_the_next_step(
    stopped: tuple[Job, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    other = ("--lr", "5e-4", "--min-lr", "5e-4", "--adam-beta1", "0.5", "--weight-decay", "0.5")
    rest, said = go_on(stopped, tmp_path, *other, "--override-opt-param-scheduler")
    assert [entry["learning rate"] for entry in rest] == pytest.approx([5e-4] * HALF)
    assert rest[0]["lm loss"] == stopped[2][HALF]["lm loss"]
    assert rest[1]["lm loss"] != stopped[2][HALF + 1]["lm loss"]
    assert "--adam-beta1 0.5 from the next step on, in place of --adam-beta1 0.9" in said


def test_a_part_may_have_a_rate_of_its_own_from_the_next_step(
    stopped: tuple[Job, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """The optimizer then has other groups of parameters than the checkpoint's."""
    rest, _ = go_on(stopped, tmp_path, "--vision-lr-mult", "0.5", "--override-opt-param-scheduler")
    assert rest[0]["lm loss"] == stopped[2][HALF]["lm loss"]
    assert rest[1]["lm loss"] != stopped[2][HALF + 1]["lm loss"]
    assert rest[1]["lm loss"] == pytest.approx(stopped[2][HALF + 1]["lm loss"], rel=0.01)


def test_a_new_optimizer_goes_on_in_the_schedule(
    stopped: tuple[Job, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Also one whose state is stored otherwise, which is refused without the flag."""
    with pytest.raises(BadInput, match=r"stored otherwise\. --no-load-optim goes on"):
        go_on(stopped, tmp_path / "refused", "--use-distributed-optimizer")
    rest, _ = go_on(stopped, tmp_path, "--use-distributed-optimizer", "--no-load-optim")
    rates = [[e["learning rate"] for e in log] for log in (rest, stopped[2][HALF:])]
    assert rates[0] == pytest.approx(rates[1])
    assert rest[0]["lm loss"] == stopped[2][HALF]["lm loss"]


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


def test_sgd_goes_on_as_if_it_had_not_been_stopped(dense: Path, data: Path, tmp_path: Path) -> None:
    job = Job(dense, data, steps=3, batch=1, flags=("--optimizer", "sgd"))
    whole = train(job, tmp_path / "whole")
    save = ("--save", str(tmp_path / "save"))
    train(job, tmp_path / "half", *save, "--exit-interval", "1")
    assert numbers_of(train(job, tmp_path / "rest", *save)) == numbers_of(whole[1:])


COUNT = 7
Seen = Callable[[], dict[str, list[Any]]]


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", ["single", "tp2xdp2"])
def test_each_record_comes_once_in_each_epoch_under_every_layout(
    layout: str, packing: bool, dense: Path, tmp_path: Path, seen: Seen
) -> None:
    data = tmp_path / "train.jsonl"
    turns = [
        [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n} " * n}]
        for n in range(1, COUNT + 1)
    ]
    data.write_text("\n".join(json.dumps({"messages": messages}) for messages in turns) + "\n")
    job = Job(dense, data, Layout.parse(layout), batch=4, packing=packing)
    at = job.argv.index("--train-iters")
    length = [*job.argv[:at], *job.argv[at + 2 :]]
    for epochs in (1, 2, 2):  # the third finds nothing left to do
        run = _WithArgv(job, (*length, "--num-epochs", str(epochs)))
        train(run, tmp_path / "run", "--save", str(tmp_path / "save"))  # type: ignore[arg-type]
    counts = Counter(n for rank, names in seen()["train"] if rank in ("0", "2") for n in names)
    assert counts == dict.fromkeys(range(1, COUNT + 1), 2)


class _WithArgv:
    """A job with another command line."""

    def __init__(self, job: Job, argv: tuple[str, ...]) -> None:
        self.argv, self.layout = list(argv), job.layout


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_rows_say_the_same_under_tp_2_and_dp_2(
    packing: bool, dense: Path, data: Path, tmp_path: Path
) -> None:
    flags = ("--use-distributed-optimizer", "--lr", "1e-3", "--lr-decay-style", "linear")
    job = Job(dense, data, Layout.parse("tp2xdp2"), STEPS, 2, packing=packing, flags=flags)
    save = ("--save", str(tmp_path / "save"))
    train(job, tmp_path / "half", *save, "--exit-interval", str(HALF))
    for changed, said in (
        (("--seed", "7"), "--seed 1234"),
        (("--adam-beta2", "0.5"), "--adam-beta2 0.95"),
        (("--lr-warmup-iters", "1"), "a warm-up of 0 steps"),
        (("--global-batch-size", "4"), "--global-batch-size 2"),
        (("--optimizer", "sgd", "--no-load-rng"), "with --use-distributed-optimizer"),
        (("--train-on", "last"), "samples that are packed already" if packing else ""),
    ):
        if said:
            with pytest.raises(BadInput, match=said):
                train(job, tmp_path / "refused", *save, *changed)
    one = replace(job, layout=Layout.parse("single"))
    rest = train(one, tmp_path / "rest", *save, "--lr", "5e-4", "--override-opt-param-scheduler")
    assert [entry["iteration"] for entry in rest] == [3, 4]
    output = (tmp_path / "rest" / "output.txt").read_text()
    assert "--tensor-model-parallel-size 1 in place of --tensor-model-parallel-size 2" in output
    assert "--lr 0.0005 from the next step on" in output
