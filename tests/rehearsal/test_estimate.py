"""``rehearse --estimate`` prints the modelled memory of every pipeline stage, by a formula."""

from __future__ import annotations

import json

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.shapes import SHAPES
from mcore_qwen3vl.training import memory
from tests.command import exit_code

SIZES = (
    *("--tensor-model-parallel-size", "4", "--sequence-parallel"),
    *("--pipeline-model-parallel-size", "4", "--expert-model-parallel-size", "8"),
    *("--expert-tensor-parallel-size", "1"),
)
UNEVEN = (
    *("--pipeline-model-parallel-size", "2"),
    *("--decoder-first-pipeline-num-layers", "11", "--decoder-last-pipeline-num-layers", "17"),
)


def run(name: str, gpus: int, *words: str, options: tuple[str, ...] = ()) -> int:
    command = ["rehearse", "--estimate", "--gpus", str(gpus), *options]
    return exit_code(*command, "--hf-model", SHAPES / f"{name}.json", *words)


@pytest.mark.parametrize(
    ("flags", "recompute"),
    [
        ((), "cheap"),
        (("--keep-activations",), "none"),
        (("--recompute-granularity", "full", "--recompute-method", "uniform"), "full"),
        (
            (
                *("--recompute-granularity", "full", "--recompute-method", "block"),
                *("--recompute-num-layers", "3"),
            ),
            3,
        ),
    ],
)
def test_every_stage_has_the_estimate_of_its_flags(
    flags: tuple[str, ...], recompute: memory.Recompute, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*SIZES, "--seq-length", "4096", *flags)
    assert run("30b_a3b", 64, *words, options=("--json",)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "modelled, not measured"
    assert (found["gpus"], found["layout"]) == (64, "tp4xpp4xep8xdp4+sp")
    a, layout = Architecture.from_hf(SHAPES / "30b_a3b.json"), Layout.parse(found["layout"])
    expected = memory.estimate_stages(a, layout, 4096, recompute)
    assert [stage["total"] for stage in found["stages"]] == [m.total for m in expected]
    assert [stage["layers"] for stage in found["stages"]] == [12] * 4


def test_a_lora_run_has_states_for_its_factors_alone(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = []
    for flags in ((), ("--lora-rank", "16")):
        assert run("8b", 8, *flags, options=("--json",)) == 0
        optimizer.append(json.loads(capsys.readouterr().out)["stages"][0]["optimizer"])
    assert 0 < optimizer[1] < optimizer[0] / 50


def test_it_is_a_table_and_what_does_not_divide_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("2b", 2, *UNEVEN) == 0
    table = capsys.readouterr().out
    assert "modelled, not measured" in table
    rows = [line.split()[:2] for line in table.splitlines() if line.strip()[:1].isdigit()]
    assert rows == [["0", "11"], ["1", "17"]]
    assert run("2b", 3, "--tensor-model-parallel-size", "3") == 2
    assert "16 attention heads cannot be divided over TP 3" in capsys.readouterr().err
    assert run("2b", 8, options=("--fit",)) == 2
    assert "--estimate rehearses nothing: drop it" in capsys.readouterr().err
