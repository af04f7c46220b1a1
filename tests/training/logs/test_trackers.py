"""Numbers reach experiment trackers; `make test-trackers` has the packages, none with a server."""

from __future__ import annotations

import json
import sqlite3
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training.arguments.checks import check_early
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.logs.trackers import PACKAGES, Trackers
from mcore_qwen3vl.verification.curves import Job, train

OWN = """
import json
from pathlib import Path

PLACE = Path(__file__).with_name("lines.jsonl")


class Lines:
    def __init__(self, config):
        self.note(begin=config)

    def note(self, **what):
        with PLACE.open("a") as file:
            print(json.dumps(what), file=file)

    def log(self, numbers, step):
        self.note(step=step, numbers=numbers)

    def finish(self, exit_code):
        self.note(end=exit_code)


class Gone(Lines):
    def log(self, numbers, step):
        super().log(numbers, step)
        raise ConnectionError("the server is gone")


def closed(config):
    raise PermissionError("no such key")
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a file of trackers that write to ``lines.jsonl`` beside it."""
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def lines(own: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in own.with_name("lines.jsonl").read_text().splitlines()]


def job_of(dense: Path, data: Path, steps: int = 3) -> Job:
    return Job(dense, data, Layout.parse("dp2"), steps=steps, seq_length=256, packing=True)


def everything(folder: Path) -> list[dict[str, Any]]:
    """Return all entries of ``--log-json``, validations among them."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_tracker_has_the_numbers_of_the_log(
    dense: Path, data: Path, own: Path, tmp_path: Path
) -> None:
    valid = ("--valid-data-path", str(data), "--eval-iters", "1", "--eval-interval", "2")
    train(job_of(dense, data), tmp_path, "--log-to", f"{own}:Lines", *valid)
    first, *steps, last = lines(own)
    assert first["begin"]["seq_length"] == 256
    assert first["begin"]["eval_interval"] == 2
    assert last == {"end": 0}  # one rank of two has made it
    kept = [{"iteration": line["step"], **line["numbers"]} for line in steps]
    assert kept == everything(tmp_path)
    assert any("validation lm loss" in entry for entry in kept)


def test_a_run_goes_on_without_a_tracker_that_takes_nothing(
    dense: Path, data: Path, own: Path, tmp_path: Path
) -> None:
    log = train(job_of(dense, data, steps=5), tmp_path, "--log-to", f"{own}:Gone", f"{own}:Lines")
    assert len(log) == 5
    taken = [line["step"] for line in lines(own) if "step" in line]
    assert taken == [1, 1, 2, 2, 3, 3, 4, 5]
    said = (tmp_path / "output.txt").read_text()
    assert said.count("did not take the numbers of step") == 3
    assert [line for line in lines(own) if "end" in line] == [{"end": 0}] * 2
    assert "of step 3: ConnectionError: the server is gone. It is sent no more" in said


def test_a_tracker_that_cannot_begin_ends_the_others(own: Path) -> None:
    trackers = Trackers([f"{own}:Lines", f"{own}:closed"])
    with pytest.raises(BadInput, match="closed cannot begin: PermissionError: no such key"):
        trackers.begin(None, None, {"freeze": ["vision", "aligner"], "lr": 1e-5})
    assert lines(own) == [{"begin": {"freeze": "vision aligner", "lr": 1e-5}}, {"end": 2}]


def test_a_number_that_is_none_is_left_out(own: Path) -> None:
    trackers = Trackers([f"{own}:Lines"])
    trackers.begin(None, None, {})
    trackers.log({"lm loss": None, "grad norm": float("nan"), "learning rate": 0.5}, 7)
    assert lines(own)[1:] == [{"step": 7, "numbers": {"learning rate": 0.5}}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--log-to", "mlfow"], "--log-to mlfow is none of mlflow, swanlab, trackio, wandb"),
        (["--log-to", "tensorboard"], "give --tensorboard-dir DIR"),
        (["--log-to", "own.py:missing"], "--log-to own.py:missing cannot be imported"),
        (["--log-project", "p"], "--log-project acts with --log-to alone"),
        (["--log-run", "r"], "--log-run acts with --log-to alone"),
        (["--log-to", "OWN:Lines", "OWN:Lines"], "twice"),
    ],
)
def test_what_is_no_tracker_is_refused(
    dense: Path, data: Path, own: Path, words: list[str], message: str
) -> None:
    given = [word.replace("OWN", str(own)) for word in words]
    with pytest.raises(BadInput, match=message):
        check_early(CommandLine([*job_of(dense, data).argv, *given]))


@pytest.mark.parametrize("package", [name for name in PACKAGES if not find_spec(name)])
def test_a_package_that_is_missing_is_named(dense: Path, data: Path, package: str) -> None:
    with pytest.raises(BadInput, match=f"needs the package {package}: pip install {package}"):
        check_early(CommandLine([*job_of(dense, data).argv, "--log-to", package]))


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, PACKAGES)), reason="`make test-trackers` installs the packages"
)
def test_each_package_has_the_numbers_of_the_log(
    dense: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.training.logs.test_wandb import history, records

    monkeypatch.chdir(tmp_path)
    for name, value in {
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }.items():
        monkeypatch.setenv(name, value)
    valid = ("--valid-data-path", str(data), "--eval-iters", "1", "--eval-interval", "3")
    names = ("--log-project", "vision", "--log-run", "first")
    train(job_of(dense, data), tmp_path, "--log-to", *PACKAGES, *names, *valid)
    log: dict[int, dict[str, float]] = {}
    for entry in everything(tmp_path):  # a validation has an entry beside its step's
        log.setdefault(entry.pop("iteration"), {}).update(entry)
    assert "validation lm loss" in log[3]

    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    seen = history(file)  # _step and _timestamp are its own
    assert {step: {n: x for n, x in seen[step].items() if n[0] != "_"} for step in seen} == log
    (run,) = (record.run for record in records(file) if record.HasField("run"))
    assert (run.project, run.display_name) == ("vision", "first")

    import mlflow

    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'vision'")
    (kept,) = client.search_runs([experiment.experiment_id])
    assert (kept.info.run_name, kept.info.status) == ("first", "FINISHED")
    assert kept.data.params["seq_length"] == "256"
    for name in {name for entry in log.values() for name in entry}:
        measured = {
            one.step: one.value for one in client.get_metric_history(kept.info.run_id, name)
        }
        assert measured == {step: entry[name] for step, entry in log.items() if name in entry}

    (place,) = (tmp_path / "trackio").glob("vision*.db")
    rows = sqlite3.connect(place).execute("select run_name, step, metrics from metrics").fetchall()
    traced: dict[int, dict[str, float]] = {}
    for name, step, text in rows:
        assert name == "first"
        traced.setdefault(step, {}).update(json.loads(text))
    assert traced == log

    (file,) = tmp_path.glob("swanlog/run-*/run-*.swanlab")
    assert all(name.encode() in file.read_bytes() for name in log[3])
