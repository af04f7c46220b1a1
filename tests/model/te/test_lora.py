"""Adapters under the ``te`` spec, beside fused norms and grouped experts, equal PEFT's."""

from __future__ import annotations

import pytest

from tests.model.te.installed import require

require()

from mcore_qwen3vl.verification.parity.matrix import Matrix, MatrixRow  # noqa: E402
from tests.model.te.rows import LORA_ROWS  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("row", LORA_ROWS, ids=str)
def test_equals_peft(matrix: Matrix, row: MatrixRow) -> None:
    report = matrix.compare_row(row)
    report.require()
    adapter = matrix.reference(row.model, lora=row.lora).adapter
    assert adapter is not None
    compared = {finding.name for finding in report.findings if finding.part == "gradients"}
    assert {f"{name}.{factor}" for name in adapter.factors for factor in ("lora_A", "lora_B")} <= (
        compared
    )
