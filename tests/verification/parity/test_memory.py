"""One model is in memory at a time, and what cannot fit is refused before anything is loaded."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import psutil
import pytest
import torch

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.runtime.launch import RanksFailed, run_layout
from mcore_qwen3vl.verification.parity import comparison, on_rank
from mcore_qwen3vl.verification.parity.case import AdamW, ParityCase
from mcore_qwen3vl.verification.parity.comparison import Needs, memory_and_disk_of, verify_parity
from mcore_qwen3vl.verification.parity.matrix import Matrix, MatrixRow
from mcore_qwen3vl.verification.parity.reference import ReferenceCheckpoint, SavedTensors
from mcore_qwen3vl.verification.report import Report
from tests.turns import slow_except

GB = 1e9


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: Any) -> Iterator[Path]:
    """Yield the folder of temporary files, which must be empty again afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert [*tmp_path.iterdir()] == []


def worst(report: Report) -> dict[tuple[str, str], float]:
    return {(f.part, f.name): f.relative_error for f in report.findings}


FREE_TENSORS = """
import psutil, torch
from mcore_qwen3vl.verification.parity.reference import return_freed_memory

process, values = psutil.Process(), 8 * 2**20 // 4
torch.ones(3 * values)  # once it is freed, glibc keeps all tensors of a smaller size
return_freed_memory()
tensors = [torch.ones(values) for _ in range(50)]
last = torch.ones(values)
before = process.memory_info().rss
tensors.clear()
print(before - process.memory_info().rss)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc has it")
def test_what_is_freed_returns_to_the_system() -> None:
    """Python is started anew, since what glibc keeps already would serve here."""
    words = [sys.executable, "-c", FREE_TENSORS]
    returned = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    print(f"observed: {returned / 2**20:.0f} MiB of 400 returned")
    assert returned > 300 * 2**20


@pytest.mark.parametrize(("dtype", "gradients"), [("fp32", True), ("fp32", False), ("bf16", True)])
def test_the_reference_leaves_memory_before_our_model_is_loaded(
    matrix: Matrix, temporary: Path, monkeypatch: Any, dtype: Any, gradients: bool
) -> None:
    loaded: WeakSet[Any] = WeakSet()
    load = ReferenceCheckpoint.load

    def noted(self: Any, wanted: Any) -> Any:
        assert not loaded, "the reference in another dtype is still in memory"
        reference = load(self, wanted)
        loaded.add(reference)
        return reference

    def run(function: Any, size: int, path: Any, case: Any, expected: Any, *rest: Any, **more: Any):
        assert not loaded
        assert all(isinstance(one.gradients, SavedTensors) for one in expected)
        stepped, *_ = rest
        assert (stepped is not None) == (dtype == "fp32" and gradients)
        assert stepped is None or isinstance(stepped.parameters, SavedTensors)
        return run_layout(function, size, path, case, expected, *rest, **more)

    monkeypatch.setattr(ReferenceCheckpoint, "load", noted)
    monkeypatch.setattr(comparison, "run_layout", run)
    path = matrix.reference("dense").path
    verify_parity(path, None, ["mixed"], dtype=dtype, gradients=gradients).require()


def test_temporary_files_are_removed_when_a_rank_fails(
    matrix: Matrix, temporary: Path, monkeypatch: Any
) -> None:
    def fail(*_: Any) -> None:
        assert [*temporary.iterdir()]
        raise ValueError("broken")

    monkeypatch.setattr(on_rank, "measure_on_rank", fail)
    with pytest.raises(RanksFailed, match="broken"):
        verify_parity(matrix.reference("dense").path, None, ["text"])


@pytest.mark.slow
def test_large_gradients_are_compared_one_batch_at_a_time(
    matrix: Matrix, temporary: Path, monkeypatch: Any
) -> None:
    path, batches = matrix.reference("dense").path, ["mixed", "text"]
    together = verify_parity(path, None, batches)
    runs = []

    def run(*args: Any, **more: Any) -> Any:
        runs.append([expected.batch.name for expected in args[4]])
        return run_layout(*args, **more)

    monkeypatch.setattr(comparison, "run_layout", run)
    monkeypatch.setattr(comparison, "GRADIENT_BYTES", 1)
    apart = verify_parity(path, None, batches)
    assert runs == [["mixed"], ["text"]]
    apart.require()
    assert {f.context for f in apart.findings} == {f.context for f in together.findings}
    stepped = [f for f in apart.findings if f.part == "parameters"]
    assert {f.context for f in stepped} == {"mixed", "text"}


@pytest.mark.parametrize("model", slow_except(["tied", "moe"], "tied"))
def test_weights_in_files_and_a_step_in_slices_change_nothing(
    matrix: Matrix, temporary: Path, monkeypatch: Any, model: str
) -> None:
    row = MatrixRow(model, "tp2+sp", ("mixed",))
    usual = matrix.compare_row(row)
    monkeypatch.setattr(on_rank, "SLICE_VALUES", 100)
    row = MatrixRow(model, "tp2+sp", ("mixed",), {"weights_in_files": True})
    in_files = Matrix(matrix._folder).compare_row(row)
    in_files.require()
    assert worst(in_files) == pytest.approx(worst(usual), rel=0.2, abs=5e-7)


def test_one_norm_that_is_wrong_by_a_thousandth_is_seen(matrix: Matrix, monkeypatch: Any) -> None:
    load, name = on_rank.load_weights, "decoder.layers.2.input_layernorm.weight"

    def load_wrongly(chunks: Any, place: Any) -> None:
        load(chunks, place)
        dict(chunks[0].named_parameters())[name].data[0] += 1e-3

    monkeypatch.setattr(on_rank, "load_weights", load_wrongly)
    report = verify_parity(matrix.reference("tied").path, Layout(tp=2, sp=True), ["mixed"])
    wrong = {failure.part for failure in report.failures}
    assert wrong >= {"logits", "gradients", "parameters"}
    by_name = max(
        (f for f in report.failures if f.part == "parameters"), key=lambda f: f.relative_error
    )
    assert by_name.name == "model.language_model.layers.2.input_layernorm.weight"


def test_small_values_count_in_the_norm_beside_large_ones() -> None:
    """float32 sums of an embedding's squares lose what is added last."""
    from mcore_qwen3vl.training.optimizer import multi_tensor_l2_norm

    gradient = torch.cat([torch.full((1024,), 4096.0), torch.ones(2**20)])
    right = (1024 * 4096.0**2 + 2**20) ** 0.5
    norm, _ = multi_tensor_l2_norm(0, torch.zeros(1), [[gradient]], False)
    assert norm.item() == pytest.approx(right, rel=1e-6)


def test_no_gradient_as_a_whole_becomes_float64(monkeypatch: Any) -> None:
    """torch copies what it converts: of a 2B's embedding 2.5 GB."""
    from mcore_qwen3vl.training import optimizer

    sizes: list[int] = []
    vector_norm = torch.linalg.vector_norm

    def noted(values: torch.Tensor, **options: Any) -> torch.Tensor:
        if options:
            sizes.append(values.numel())
        return vector_norm(values, **options)

    gradient = torch.randn(25, 100)
    right = gradient.norm().item()
    monkeypatch.setattr(optimizer, "PIECE_VALUES", 1000)
    monkeypatch.setattr(torch.linalg, "vector_norm", noted)
    norm, _ = optimizer.multi_tensor_l2_norm(0, torch.zeros(1), [[gradient]], False)
    assert sizes == [1000, 1000, 500]
    assert norm.item() == pytest.approx(right, rel=1e-6)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The config of the published 2B, without weights."""
    path = tmp_path / "2b"
    path.mkdir()
    (path / "config.json").write_text((PUBLISHED / "2b.json").read_text())
    return path


def needs(path: Path, layout: str, **options: Any) -> Needs:
    case = ParityCase(Layout.parse(layout), adamw=AdamW(), **options)
    return memory_and_disk_of(ReferenceCheckpoint(path), case, ["mixed"])


def test_the_needs_are_those_of_one_model_with_its_gradients(published: Path) -> None:
    model = 4 * 2.127e9  # bytes of the whole 2B in float32
    largest = 4 * 151_936 * 2048
    single = needs(published, "single")
    assert single.memory == pytest.approx(2 * model + 3 * largest, abs=1.5 * GB)  # it is tied
    assert single.disk == pytest.approx(2 * model, rel=0.01)  # gradients and parameters
    in_files = needs(published, "single", weights_in_files=True)
    assert single.memory - in_files.memory == pytest.approx(model, rel=0.01)
    assert in_files.disk == pytest.approx(3 * model, rel=0.01)
    assert needs(published, "cp2").memory == pytest.approx(4 * model + 6 * largest, abs=2 * GB)
    forward = memory_and_disk_of(
        ReferenceCheckpoint(published), ParityCase(gradients=False), ["mixed"]
    )
    assert forward.memory == pytest.approx(model, abs=1.5 * GB)
    assert forward.disk == 0


def test_what_cannot_fit_is_refused_before_it_is_loaded(
    matrix: Matrix, temporary: Path, monkeypatch: Any
) -> None:
    path = matrix.reference("dense").path

    def load(*_: Any) -> None:
        raise AssertionError("loaded")

    said: list[str] = []
    monkeypatch.setattr(ReferenceCheckpoint, "load", load)
    with monkeypatch.context() as small:
        small.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**8))
        with pytest.raises(BadInput, match=r"of memory, of 0\.1 GB available.*--no-gradients"):
            verify_parity(path, None, ["text"], say=said.append)
    with monkeypatch.context() as full:
        full.setattr(comparison.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(BadInput, match=r"has 0\.0 GB free.*TMPDIR"):
            verify_parity(path, None, ["text"], say=said.append)
    assert said == []


def test_the_line_at_the_start(matrix: Matrix, capsys: Any) -> None:
    from tests.command import exit_code

    path = matrix.reference("dense").path
    assert exit_code("verify", "parity", path, "--batches", "text", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ok"]
    assert captured.err.startswith("At single this comparison takes up to ")
    assert captured.err.count("\n") == 1
