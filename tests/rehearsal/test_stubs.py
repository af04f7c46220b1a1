"""The stub of flash-linear-attention takes, keeps and launches what the package does."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.rehearsal.rehearse import IMPORTS
from mcore_qwen3vl.simulated_gpu import Workbench
from mcore_qwen3vl.tiny.tiny_checkpoint import write_stand_in
from mcore_qwen3vl.training import memory

PACKED, SINGLE = (0, 1000, 1000, 2500, 4096), (0, 4096)
HEADS = 4  # of values; half as many of keys
KERNEL = 512
"""Bytes that the stub takes to launch a kernel; each tensor is rounded up to as much."""
RECORDED = {
    "rule": {"kept": 6422528, "peaks": [31588352, 52592640], "launches": [8, 15]},
    "convolution": {"kept": 0, "peaks": [4194304, 8925184], "launches": [1, 4]},
}
"""What version 0.6.0 took, on the simulated GPU as well, of one sample."""


def call(
    workbench: Workbench, operation: str, package: bool, bounds: tuple[int, ...]
) -> dict[str, Any]:
    program = "tests.rehearsal.programs:delta_net_kernels"
    result, report = workbench.call(program, operation, package, bounds, HEADS)
    assert report.interval("end").counters["unknown_calls"] == 0
    return dict(result)


def check(stub: dict[str, Any], package: dict[str, Any]) -> None:
    assert stub["launches"] == package["launches"]
    for part in ("kept", "peaks"):
        assert stub[part] == pytest.approx(package[part], abs=KERNEL), part


@pytest.mark.parametrize("operation", RECORDED)
def test_one_sample_takes_what_was_recorded(operation: str, workbench: Workbench) -> None:
    check(call(workbench, operation, False, SINGLE), RECORDED[operation])


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("fla") is None,
    reason="flash-linear-attention is not installed; what it took is recorded",
)
@pytest.mark.parametrize("bounds", [PACKED, SINGLE])
@pytest.mark.parametrize("operation", RECORDED)
def test_it_is_what_the_package_takes(
    operation: str, bounds: tuple[int, ...], workbench: Workbench
) -> None:
    check(call(workbench, operation, False, bounds), call(workbench, operation, True, bounds))


@pytest.mark.parametrize("cheap", [True, False], ids=["recomputed", "kept"])
def test_a_layer_keeps_what_the_estimate_says(
    cheap: bool, workbench: Workbench, tmp_path: Path
) -> None:
    """Three layers with a gated delta net and one with attention, at the width of 9B."""
    model = tmp_path / "model"
    write_stand_in(PUBLISHED / "qwen3.5_9b.json", model, layers=4, vision_blocks=1)
    program = "tests.rehearsal.programs:kept_by_layers"
    kept, _ = workbench.call(program, model, 8192, cheap)
    a = Architecture.from_hf(model)
    assert a.delta_net_layers == (True, True, True, False)
    for layer, size in enumerate(kept):
        estimate = memory._layer_activations(a, Layout(), 8192, layer, cheap)
        assert size == pytest.approx(estimate, rel=0.002), layer


def test_a_package_that_is_installed_stays_unused(tmp_path: Path) -> None:
    """At its import it would start CUDA in the process that all ranks are forked from."""
    (tmp_path / "fla.py").write_text("raise SystemExit('it was imported')")
    program = (
        f"import sys, importlib; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"importlib.import_module({IMPORTS[0]!r})\n"
        "from importlib.util import find_spec\n"
        "assert find_spec('fla') is None\n"
        "try: import fla\n"
        "except ImportError: print('hidden')\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "hidden\n"
