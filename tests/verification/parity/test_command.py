"""``mcore-qwen3vl verify parity`` has the right layout flags, reports and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verification.measurement import Finding, Measurement
from mcore_qwen3vl.verification.parity import comparison
from mcore_qwen3vl.verification.parity.case import RECIPES
from mcore_qwen3vl.verification.parity.matrix import Matrix
from mcore_qwen3vl.verification.report import Report
from tests.command import exit_code
from tests.converters.checkpoints import copy


def run(*arguments: Any) -> int:
    return exit_code("verify", "parity", *arguments)


def test_a_layout_that_holds_and_one_that_does_not(
    matrix: Matrix, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    asked = (matrix.reference("dense").path, "--tp", 2, "--sp", "--batches", "image")
    assert run(*asked, "--no-gradients", "--json", "--report", tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "report.json").read_text())
    assert [one["argument"] for one in written.pop("certificate")["inputs"]] == ["hf"]
    assert report == written
    assert (report["ok"], report["environment"]["layout"]) == (True, "tp2+sp")
    assert report["title"].endswith("at tp2+sp against Hugging Face")
    monkeypatch.setattr(comparison, "TOLERANCE", 1e-9)
    assert run(*asked, "--no-gradients", "--report", tmp_path) == 1
    printed = capsys.readouterr()
    assert "logits all (image): relative error" in printed.out
    assert "2 of 2 comparisons failed" in printed.out
    assert printed.err.count("\n") == 1  # the memory that it takes
    assert "FAILED" in (tmp_path / "report.html").read_text()


def test_an_adapters_reference_is_pefts_model(matrix: Matrix, capsys: Any) -> None:
    asked = (matrix.reference("dense").path, "--lora", "language", "--batches", "text")
    assert run(*asked, "--no-gradients", "--json") == 0
    assert json.loads(capsys.readouterr().out)["title"].endswith("at single against PEFT")


def test_a_damaged_checkpoint_is_no_failed_check(
    matrix: Matrix, tmp_path: Path, capsys: Any
) -> None:
    broken = copy(matrix.reference("dense").path, tmp_path / "broken")
    file = next(broken.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    assert run(broken, "--no-gradients") == 2
    message = capsys.readouterr().err
    assert file.name in message
    assert message.count("\n") == 2  # the first says what memory the comparison takes


def test_a_layout_that_cannot_be(matrix: Matrix, capsys: Any) -> None:
    assert run(matrix.reference("dense").path, "--pp", 3) == 2
    assert "PP" in capsys.readouterr().err


def test_the_te_spec_is_given_no_padding_on_the_left(
    matrix: Matrix, capsys: Any, monkeypatch: Any
) -> None:
    """On a GPU, a device assertion would end the command and lose what had been compared."""
    path = matrix.reference("dense").path
    named: list[str] = []

    def compare(reference: Any, case: Any, names: Any, **_: Any) -> Report:
        named.extend(names)
        return Report("nothing", {}, [Finding("logits", "all", Measurement(), 0.0)])

    with monkeypatch.context() as patched:
        patched.setattr(comparison, "compare_case", compare)
        run(path, "--spec", "te")
    assert {*named} == {*RECIPES} - {"padded-left"}
    assert run(path, "--spec", "te", "--batches", "text,padded-left") == 2
    assert "padded-left is padded on the left" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_progress_counts_every_pass_of_both_models(matrix: Matrix, dtype: Any) -> None:
    shown: list[Any] = []

    @contextmanager
    def progress(title: str, total: int, what: str) -> Iterator[Callable[[int], None]]:
        shown.append(total)
        yield shown.append

    layout, batches = Layout(pp=2), ["text", "ragged"]  # uneven batches run by themselves
    path = matrix.reference("dense").path
    comparison.verify_parity(path, layout, batches, gradients=False, dtype=dtype, progress=progress)
    total = shown[0]
    assert total == {"fp32": 4, "bf16": 6}[dtype]
    assert shown[1:] == [*range(1, total + 1)]
