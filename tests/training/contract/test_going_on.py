"""For each row of the contract, a run is stopped, changed and goes on, and does what is said."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.contract.record import FILE
from mcore_qwen3vl.training.contract.table import ROWS
from tests.losses.pairs import as_tar, write_pairs
from tests.training.contract.cases import CASES, REFUSED, SILENT, UNUSED, Case
from tests.training.contract.going_on import STEPS, Going, run, run_and_stop

BASE = (
    *("--num-workers", "0", "--seq-length", "128", "--micro-batch-size", "1"),
    *("--lr", "1e-3", "--weight-decay", "0.1", "--log-interval", "1"),
)
DEFAULTS = {"--data-path": "{images}", "--global-batch-size": "2", "--lr-decay-style": "linear"}
Stopped = Callable[[Case, str, bool], tuple[Going, Path]]


@pytest.fixture(scope="module")
def given(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the data sets and models that cases name."""
    folder = tmp_path_factory.mktemp("given")
    images = write_image_qa(folder / "images", 14)
    lines = images.read_text().splitlines(keepends=True)
    named = {"images": images, "moved": folder / "elsewhere" / "train.jsonl"}
    shutil.copytree(images.parent, named["moved"].parent)
    for name, kept in (
        ("reversed", lines[::-1]), ("fewer", lines[:-1]), ("seven", lines[:7]),
    ):  # fmt: skip
        named[name] = images.with_name(f"{name}.jsonl")
        named[name].write_text("".join(kept))
    named["grown"] = named["moved"].with_name("fewer.jsonl")
    named["grown"].write_text("".join(lines))
    named["pairs"] = write_pairs(folder / "pairs", 14)
    named["tar"] = folder / "tar"
    as_tar(images, named["tar"])
    named["tars"] = folder / "tars"
    shutil.copytree(named["tar"], named["tars"])
    as_tar(images, folder / "another")
    shutil.move(folder / "another" / "0.tar", named["tars"] / "1.tar")
    named["other"] = folder / "other"
    shutil.copytree(dense, named["other"])
    config = named["other"] / "config.json"
    config.write_text(re.sub(r'"rope_theta": [\d.e+]+', '"rope_theta": 123456', config.read_text()))
    return named


def argv_of(
    case: Case, flags: str, layout: str, packing: bool, given: dict[str, Path], model: Path
) -> list[str]:
    """Return a command line; what `flags` do not say is as in all cases."""
    words = flags.format(**given).split()
    for flag, value in DEFAULTS.items():
        words += [] if flag in words else [flag, value.format(**given)]
    if not {"--num-epochs", "--train-iters"} & {*words}:
        words += ["--train-iters", str(STEPS)]
    words += [] if "--hf-model" in words else ["--hf-model", str(model)]
    words += ["--packing"] * packing
    ranks = Layout.parse(layout)
    # Under TP, Megatron-Core trains experts with sequence parallelism only.
    words += ["--sequence-parallel"] * (case.model == "moe" and ranks.tp > 1)
    return ["--cpu", "--load-hf", str(model), *BASE, *ranks.flags(moe=True), *words]


@pytest.fixture(scope="module")
def stopped(
    given: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Stopped:
    """Return a function that gives a case's run, and its checkpoints where it was stopped."""

    @cache
    def of_run(model: str, flags: str, stop: int, layout: str, packing: bool) -> tuple[Going, Path]:
        case = Case("", flags, "", "", model=model)
        path: Path = request.getfixturevalue(model)
        argv = argv_of(case, flags, layout, packing, given, path)
        return run_and_stop(argv, Layout.parse(layout), tmp_path_factory.mktemp("run") / "r", stop)

    return lambda case, layout, packing: of_run(case.model, case.run, case.stop, layout, packing)


def settings() -> Iterator[object]:
    """Yield each case under both layouts, with packing and without; most of them are slow."""
    for layout in ("single", "tp2xdp2"):
        for packing in (False, True):
            for case in CASES:
                if case.only in (None, packing):
                    slow = layout != "single" or packing
                    name = f"{layout}, {'packed' if packing else 'padded'}, {case}"
                    marks = [pytest.mark.slow] if slow else []
                    yield pytest.param(case, layout, packing, id=name, marks=marks)


@pytest.mark.parametrize(("case", "layout", "packing"), settings())
def test_a_run_that_goes_on_does_what_the_table_says(
    case: Case,
    layout: str,
    packing: bool,
    given: dict[str, Path],
    stopped: Stopped,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    whole, checkpoints = stopped(case, layout, packing)
    if case.record:
        checkpoints = with_record(checkpoints, tmp_path / "copy", case)
    then = case.layout.get(layout, layout)
    model: Path = request.getfixturevalue(case.model)
    argv = argv_of(case, case.then, then, packing, given, model)
    argv += ["--load", str(checkpoints)]
    if case.comes == REFUSED:
        with pytest.raises(BadInput, match=f"(?s){case.words}"):
            run(argv, Layout.parse(then), tmp_path / "refused")
        return
    rest = run(argv, Layout.parse(then), tmp_path / "rest")
    begins = "not used" if case.comes == UNUSED else f"{case.row}: "
    said = [line for line in rest.said.splitlines() if line.startswith(begins)]
    if case.comes == SILENT:
        assert said == []
    else:
        assert len(said) == 1
        assert re.search(case.words, said[0])
    assert case.effect is not None
    case.effect(whole, rest)


def with_record(checkpoints: Path, copy: Path, case: Case) -> Path:
    """Return a copy of the checkpoints whose record has a case's values."""
    shutil.copytree(checkpoints, copy)
    file = data_state.folder_of(copy, case.stop) / FILE
    record = json.loads(file.read_text())
    record["rows"] |= case.record
    file.write_text(json.dumps(record))
    return copy


def test_every_row_has_a_case() -> None:
    assert {row.name for row in ROWS} == {case.row for case in CASES}
