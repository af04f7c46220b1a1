"""``mcore-qwen3vl memory`` prints an estimate for every pipeline stage, and calls it modelled."""

from __future__ import annotations

import json

import pytest

from mcore_qwen3vl.cli import main
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.shapes import SHAPES
from mcore_qwen3vl.training import memory


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["memory", *map(str, arguments)])
    return stopped.value.code


LAYOUT = ("--tp", "4", "--sp", "--pp", "4", "--ep", "8", "--dp", "4")


def test_the_command_prints_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    shape = SHAPES / "30b_a3b.json"
    assert run(shape, *LAYOUT, "--seq-length", "4096", "--recompute", "full", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "modelled, not measured"
    assert (found["gpus"], found["layout"]) == (64, "tp4xpp4xep8xdp4+sp")
    expected = memory.by_stage(
        Architecture.from_hf(shape), Layout.parse(found["layout"]), memory.Workload(4096), "full"
    )
    assert [stage["total"] for stage in found["stages"]] == [m.total for m in expected]
    assert [stage["layers"] for stage in found["stages"]] == [12] * 4


def test_the_command_prints_a_table_and_refuses_what_does_not_divide(
    capsys: pytest.CaptureFixture[str],
) -> None:
    uneven = ("--decoder-first-pipeline-num-layers", "11")
    assert run(SHAPES / "2b.json", "--pp", "2", *uneven) == 0
    table = capsys.readouterr().out
    assert "modelled, not measured" in table
    rows = [line.split()[:2] for line in table.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [["0", "11"], ["1", "17"]]
    split = ("--pipeline-model-parallel-layout", "E|t*9|t*10|t*9L")
    assert run(SHAPES / "2b.json", "--pp", "2", *split, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [stage["layers"] for stage in found["stages"]] == [10, 18]
    assert run(SHAPES / "2b.json", "--tp", "3") == 2
    assert "16 attention heads cannot be divided over TP 3" in capsys.readouterr().err


def test_a_published_model_is_named_by_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    listings = []
    for model in ("8b", SHAPES / "8b.json"):
        assert run(model, "--tp", "2", "--json") == 0
        listings.append(json.loads(capsys.readouterr().out))
    assert listings[0] == listings[1]
