"""Models equal Hugging Face's with all our kernels, as Triton interprets them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from mcore_qwen3vl.runtime import launch
from mcore_qwen3vl.verification.parity.matrix import ACCUMULATED, Matrix, row
from tests.kernels.interpreted import run_interpreted

ROWS = {
    # Norms around zero with recomputed outputs, and gradients that products add up.
    "qwen3.5, TP 2 with SP": row("qwen3.5", "tp2+sp", "packed", **ACCUMULATED),
    "MoE": row("moe", "single", "packed"),
    "MoE, EP 2": row("moe", "ep2xdp2", "packed"),
    "LoRA, the tower's linears too": row("dense", "single", "mixed", lora="everything"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_model_with_our_kernels_equals_hugging_faces(name: str) -> None:
    run_interpreted(__file__, name)


if __name__ == "__main__":
    launch.PATIENCE = 8  # an interpreted kernel takes a millisecond for each program
    with tempfile.TemporaryDirectory() as folder:
        report = Matrix(Path(folder)).compare_row(ROWS[sys.argv[1]])
    print([finding for finding in report.findings if not finding.ok])
    sys.exit(not report.ok)
