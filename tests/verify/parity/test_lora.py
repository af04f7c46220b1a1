"""All that trains equals PEFT's, for every kind of target and of parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verify.parity.case import ADAPTERS
from mcore_qwen3vl.verify.parity.comparison import verify_parity
from mcore_qwen3vl.verify.parity.matrix import LORA_MATRIX, Matrix, MatrixRow
from mcore_qwen3vl.verify.parity.reference import AFTER_STEP

FAST = {
    "dense dp2 LoRA: mixed ranks distr. opt., overlap",
    "dense single LoRA: whole",
    "few-kv tp4+sp LoRA: mixed ranks",
    "tied tp2xpp2+sp LoRA: whole tied",
    "moe ep2xdp2 LoRA: experts",
    "moe pp2xvpp2 LoRA: router",
    "qwen3.5 tp2xcp2+sp LoRA: hybrid",
    "qwen3.5-moe single LoRA: hybrid experts",
}
"""With `test_lora_rules`, one row for each rule; `make test-all` and `make parity` run all rows."""

ROWS = [
    pytest.param(row, marks=() if str(row) in FAST else pytest.mark.slow, id=str(row))
    for row in LORA_MATRIX
]


@pytest.mark.parametrize("row", ROWS)
def test_equals_peft(matrix: Matrix, row: MatrixRow) -> None:
    report = matrix.compare_row(row)
    report.require()
    expected = {"logits", "loss", "gradients", "parameters", "gradient norm"}
    if row.options.get("overlap") and row.options.get("distributed_optimizer"):
        expected |= {AFTER_STEP}
    assert {part for _, part in report.parts()} == expected
    adapter = matrix.reference(row.model, lora=row.lora).adapter
    assert adapter is not None
    compared = {finding.name for finding in report.findings if finding.part == "gradients"}
    factors = {f"{name}.{factor}" for name in adapter.factors for factor in ("lora_A", "lora_B")}
    assert factors <= compared
    # Besides factors, only what is trained whole has gradients; experts are compared one by one.
    rest = {name.partition("[")[0] for name in compared - factors}
    tied = {"lm_head.weight"} if row.model == "tied" else set()
    assert rest == set(adapter.saved) - set(adapter.factors) - tied


def test_the_matrix_has_every_kind_of_parallelism_and_of_target() -> None:
    assert {str(row) for row in LORA_MATRIX} >= FAST
    assert {row.lora for row in LORA_MATRIX} == set(ADAPTERS)
    layouts = [Layout.parse(row.layout) for row in LORA_MATRIX]
    for name in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp"):
        assert any(getattr(layout, name) > 1 for layout in layouts), name
    assert any(layout.sp for layout in layouts)
    assert len({(row.layout, row.note) for row in LORA_MATRIX}) >= 24


@pytest.mark.slow
def test_verify_parity_judges_an_adapter_in_bf16(matrix: Matrix) -> None:
    reference = matrix.reference("dense", lora="mixed ranks")
    adapter = matrix.adapter("dense", "mixed ranks")
    half = verify_parity(
        reference.path, Layout(tp=2, sp=True), ["image"], lora=adapter, dtype="bf16", timeout=60
    )
    half.require()
    assert all(1e-4 < finding.tolerance < 0.5 for finding in half.findings)


def test_an_adapter_that_does_not_fit_is_refused(matrix: Matrix, tmp_path: Path) -> None:
    path = matrix.reference("dense").path
    with pytest.raises(BadInput, match=r"adapter_config\.json does not exist"):
        verify_parity(path, None, ["text"], lora=tmp_path)
    matrix.reference("moe")
    adapter = matrix.adapter("moe", "experts")
    with pytest.raises(BadInput, match="experts"):
        verify_parity(path, None, ["text"], lora=adapter)
