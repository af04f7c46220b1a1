"""``mcore-qwen3vl memory``: the estimate of every pipeline stage, and that it says what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.shapes import SHAPES
from mcore_qwen3vl.training import memory


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The real command."""
    command = [Path(sys.executable).with_name("mcore-qwen3vl"), "memory", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


LAYOUT = ("--tp", "4", "--sp", "--pp", "4", "--ep", "8", "--dp", "4")


def test_the_command_prints_every_stage() -> None:
    shape = SHAPES / "30b_a3b.json"
    done = run(shape, *LAYOUT, "--seq-length", "4096", "--recompute", "full", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kind"] == "modelled, not measured"
    assert (found["gpus"], found["layout"]) == (64, "tp4xpp4xep8xdp4+sp")
    expected = memory.by_stage(
        Architecture.from_hf(shape), Layout.parse(found["layout"]), memory.Workload(4096), "full"
    )
    assert [stage["total"] for stage in found["stages"]] == [m.total for m in expected]
    assert [stage["layers"] for stage in found["stages"]] == [12] * 4


def test_the_command_prints_a_table_and_refuses_what_does_not_divide() -> None:
    uneven = ("--decoder-first-pipeline-num-layers", "11")
    done = run(SHAPES / "2b.json", "--pp", "2", *uneven)
    assert "modelled, not measured" in done.stdout
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [["0", "11"], ["1", "17"]]
    split = ("--pipeline-model-parallel-layout", "E|t*9|t*10|t*9L")
    done = run(SHAPES / "2b.json", "--pp", "2", *split, "--json")
    assert [stage["layers"] for stage in json.loads(done.stdout)["stages"]] == [10, 18]
    done = run(SHAPES / "2b.json", "--tp", "3")
    assert done.returncode == 2
    assert "16 attention heads cannot be divided over TP 3" in done.stderr
