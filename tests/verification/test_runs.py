"""Two runs are compared step by step, and the first thing that differs is named."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from mcore_qwen3vl.converters.storage import archive
from mcore_qwen3vl.converters.torch_dist import read_metadata
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training import optimizer_state
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.verification import runs
from mcore_qwen3vl.verification.runs import RunComparison, compare_runs
from mcore_qwen3vl.verification.search import records
from mcore_qwen3vl.verification.search.case import Case, Flag, Stop
from mcore_qwen3vl.verification.search.running import Bench, Outcome
from tests.command import exit_code
from tests.turns import slow

LINES = records.lines(Random(1), (records.one_image, records.text_only), 8, False)
RUN = Case(
    (), LINES, (("--save-interval", "2"), ("--hidden-dropout", "0.1"),
                ("--use-distributed-optimizer",)), steps=4,
)  # fmt: skip
STEADY = replace(RUN, flags=tuple(flag for flag in RUN.flags if flag[0] != "--hidden-dropout"))
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("runs"))
    yield made
    made.close()


def compared(one: Outcome, other: Outcome, **options: Any) -> RunComparison:
    for outcome in (one, other):
        assert outcome.finished, outcome.refusal
    folders = one.folder, other.folder
    return compare_runs(
        *(folder / "save" for folder in folders),
        logs=(folders[0] / "log.jsonl", folders[1] / "log.jsonl"),
        **options,
    )


def first(report: RunComparison) -> tuple[str, str, str]:
    """Return step, part and name of the first finding that does not hold."""
    wrong = next(finding for finding in report.findings if not finding.ok)
    assert str(wrong) == report.notes["The first difference"]
    return wrong.context, wrong.part, wrong.name


def test_a_run_that_was_stopped_is_the_run_that_was_not(bench: Bench) -> None:
    report = compared(bench.run(RUN), bench.run(replace(RUN, stop=Stop("saved", 2))))
    assert report.ok, report.failures
    assert "The first difference" not in report.notes
    assert "give the folders of --log-records" in report.notes["Not compared"]
    parts = {finding.part for finding in report.findings}
    assert parts == {
        "log", "settings", "data", "schedule", "random states", "exp_avg", "exp_avg_sq", "weights",
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["tp2+sp", *slow("dp2", "pp2", "cp2")])
def test_layouts_give_the_same_run(layout: str, bench: Bench) -> None:
    report = compared(bench.run(STEADY), bench.run(replace(STEADY, layout=layout)))
    assert report.ok, report.failures
    assert report.environment["layouts"] == f"single and {layout}"
    assert not [one for one in report.findings if one.part == "random states"]


@pytest.mark.slow
def test_experts_under_another_ep_and_bf16_are_compared(bench: Bench) -> None:
    moe = replace(STEADY, model=("--moe",), flags=(*STEADY.flags, ("--bf16",)))
    report = compared(bench.run(moe), bench.run(replace(moe, layout="ep2xdp2")))
    assert report.ok, report.failures


OVERRIDE: Flag = ("--override-opt-param-scheduler",)
CHANGED: dict[str, tuple[tuple[Flag, ...], tuple[str, str]]] = {
    "rate": ((("--lr", "2e-3"), OVERRIDE), ("settings", "learning rate")),
    "decay": ((("--weight-decay", "0.3"), OVERRIDE), ("settings", "weight decay")),
    "betas": ((("--adam-beta1", "0.7"), OVERRIDE), ("settings", "hyperparameters")),
    "pixels": ((("--image-max-pixels", "1000"),), ("settings", "reading of records")),
    "clipping": ((("--clip-grad", "0.1"),), ("settings", "gradient clipping")),
    "dropout": ((("--hidden-dropout", "0"),), ("settings", "dropout")),
    "moments": ((("--no-load-optim",),), ("log", "lm loss")),
    "random states": ((("--no-load-rng",),), ("log", "lm loss")),
}


@pytest.mark.parametrize("name", ["rate", *slow(*list(CHANGED)[1:])])
def test_what_a_resume_changed_is_named(name: str, bench: Bench) -> None:
    flags, expected = CHANGED[name]
    report = compared(bench.run(RUN), bench.run(replace(RUN, stop=Stop("saved", 2, flags=flags))))
    step, part, what = first(report)
    assert (part, what) == expected
    assert step in ("step 3", "step 4")  # moments that are lost show a step later
    assert {finding.context for finding in report.failures} <= {"step 3", "step 4"}
    if name == "random states":
        assert [one for one in report.failures if one.part == "random states"]


def test_random_states_are_compared_with_those_of_numpy(tmp_path: Path) -> None:
    """A checkpoint's are read as stand-ins of numpy's classes."""
    states = []
    for seed in (1, 2):
        state = [{"np_rng_state": np.random.RandomState(seed).get_state(), "torch": None}]
        torch.save(state, tmp_path / "state.pt")
        states.append(archive.load(tmp_path / "state.pt"))
    one, other = states
    assert runs._first_unequal(one, one) == ""
    assert runs._first_unequal(one, other) == "np_rng_state differs"
    assert runs._first_unequal([object()], [object()]).endswith("which this cannot compare")


def _data_begin_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(data_state, "load", lambda *args: None)


def _adam_counts_from_zero(patch: pytest.MonkeyPatch) -> None:
    groups = optimizer_state._own_groups

    def from_zero(*args: Any) -> Any:
        return [{**group, "step": 0} if "step" in group else group for group in groups(*args)]

    patch.setattr(optimizer_state, "_own_groups", from_zero)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [_data_begin_anew, _adam_counts_from_zero])
def test_a_fault_of_a_resume_is_seen(
    plant: Plant, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bench.run(RUN)
    plant(monkeypatch)
    faulty = bench.run(replace(RUN, stop=Stop("saved", 2, "single")))  # not the one run before
    report = compared(whole, faulty)
    assert not report.ok
    assert first(report)[0] in ("step 3", "step 4")


@pytest.mark.parametrize(
    ("part", "prefix", "name"),
    [
        ("weights", "optimizer.state.param.", "decoder.final_layernorm.weight"),
        ("exp_avg_sq", "optimizer.state.exp_avg_sq.", "output_layer.weight"),
    ],
)
def test_a_tensor_that_was_changed_is_named(
    part: str, prefix: str, name: str, bench: Bench, tmp_path: Path
) -> None:
    whole, other = bench.run(RUN).folder / "save", tmp_path / "other"
    shutil.copytree(whole, other)
    _add_to_tensor(other / "iter_0000004", f"{prefix}{name}")
    (wrong,) = compare_runs(whole, other).failures
    assert (wrong.context, wrong.part, wrong.name) == ("step 4", part, name)


def _add_to_tensor(folder: Path, key: str) -> None:
    """Change the bytes of a tensor in its file, whose checksum is not read."""
    chunk = read_metadata(folder).tensors[key].chunks[0]
    file = folder / chunk.data.file
    whole = bytearray(file.read_bytes())
    archive = memoryview(whole)[chunk.data.offset :][: chunk.data.length]
    values = torch.load(io.BytesIO(bytes(archive)), weights_only=True)
    raw = values.numpy().tobytes()
    place = bytes(archive).index(raw)
    archive[place : place + len(raw)] = (values * 1.5 + 0.01).numpy().tobytes()
    file.write_bytes(whole)


def test_records_of_each_step_are_compared_by_name(tmp_path: Path, bench: Bench) -> None:
    whole = bench.run(RUN).folder / "save"
    for side, third in (("a", "train.jsonl:7"), ("b", "train.jsonl:8")):
        (tmp_path / side).mkdir()
        lines = [["x/train.jsonl:1"], [f"{side}/train.jsonl:2"], [third]]
        text = "".join(
            json.dumps({"iteration": step, "records": names}) + "\n"
            for step, names in enumerate(lines, 1)
        )
        (tmp_path / side / "rank_00000.jsonl").write_text(text)
    report = compare_runs(whole, whole, records=(tmp_path / "a", tmp_path / "b"))
    assert first(report) == ("step 3", "records", "names")
    (wrong,) = report.failures
    assert wrong.flaw == "only A has train.jsonl:7; only B has train.jsonl:8"


def test_a_run_logs_the_records_of_each_step_on_each_rank(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    case = replace(STEADY, layout="dp2", flags=(*STEADY.flags, ("--log-records", str(folder))))
    outcome = bench.run(case)
    for step in range(1, 5):
        names = [
            name.rsplit("/", 1)[-1]
            for file in sorted(folder.glob("rank_0000[01].jsonl"))
            for entry in map(json.loads, file.read_text().splitlines())
            if entry["iteration"] == step
            for name in entry["records"]
        ]
        assert sorted(names) == sorted(outcome.names(step).elements())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["empty", "empty"], "has no checkpoints iter_*"),
        (["a", "a", "--logs", "torn", "torn"], "cannot be read as lines of JSON"),
        (["a", "a", "--records", "empty", "empty"], "has no rank_*.jsonl"),
    ],
)
def test_bad_input_is_named(
    words: list[str],
    said: str,
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("torn").write_text('{"iteration": 1, "lear')
    Path("a").symlink_to(bench.run(RUN).folder / "save")
    assert exit_code("verify", "resume", *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_runs_without_a_common_step_are_refused(bench: Bench, tmp_path: Path) -> None:
    whole = bench.run(RUN).folder / "save"
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    shutil.rmtree(other / "iter_0000002")
    (other / "iter_0000004").rename(other / "iter_0000003")
    with pytest.raises(BadInput, match="no step in common"):
        compare_runs(whole, other)
