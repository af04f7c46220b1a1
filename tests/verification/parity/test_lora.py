"""All that trains equals PEFT's, for every kind of target and of parallelism.

Each gradient rule of LoRA matters: if it is broken deliberately, the comparison fails. Ranks are
forked from this process, so a function replaced here is replaced there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megatron.core.tensor_parallel import mappings

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import lora, lora_modules
from mcore_qwen3vl.model.lora_modules import Pair
from mcore_qwen3vl.verification.parity.case import ADAPTERS
from mcore_qwen3vl.verification.parity.comparison import verify_parity
from mcore_qwen3vl.verification.parity.matrix import LORA_MATRIX, OVERLAPPED, Matrix, MatrixRow
from mcore_qwen3vl.verification.parity.reference import AFTER_STEP
from tests.verification.parity.test_rules import FAR_OFF, worst

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
"""With the rules below, one row for each rule; `make test-all` and `make parity` run all rows."""

ROWS = [
    pytest.param(row, marks=() if str(row) in FAST else pytest.mark.slow, id=str(row))
    for row in LORA_MATRIX
]


@pytest.mark.parametrize("row", ROWS)
def test_equals_peft(matrix: Matrix, row: MatrixRow) -> None:
    report = matrix.compare_row(row)
    report.require()
    expected = {"logits", "loss", "gradients"}
    if "dtype" not in row.options:  # in float32
        expected |= {"parameters", "gradient norm"}
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


def marking(monkeypatch: Any, cut: int | None, expert: bool, mark: str, value: Any) -> None:
    """Set one mark of all factors of one kind of linear to a wrong value."""
    original = lora_modules.LinearKind.mark_factors

    def wrong(self: lora_modules.LinearKind, pair: Pair, weight: Any) -> None:
        original(self, pair, weight)
        if self.partition_dim == cut and self.expert == expert:
            for factor in (pair.lora_A, pair.lora_B):
                if hasattr(factor, mark):
                    setattr(factor, mark, value)

    monkeypatch.setattr(lora_modules.LinearKind, "mark_factors", wrong)


SP, AVERAGE = "sequence_parallel", "average_gradients_across_tp_domain"
FACTORS = {
    "A beside a column is summed over TP": (
        ("dense", "tp2+sp", "mixed ranks", 0, False, {SP: False}),
        ["gradients gate_proj.weight.lora_A"],
        ["gradients gate_proj.weight.lora_B", "logits "],
    ),
    "B beside a row is summed over TP": (
        ("dense", "tp2+sp", "mixed ranks", 1, False, {SP: False}),
        ["gradients o_proj.weight.lora_B"],
        ["gradients o_proj.weight.lora_A", "logits "],
    ),
    "a cut factor is counted on every rank": (
        ("dense", "tp2", "mixed ranks", 0, False, {"tensor_model_parallel": False}),
        ["gradient norm "],
        ["gradients "],
    ),
    # Frames are divided over TP: a rank's gradient is a part, or twice a part without SP.
    **{
        f"vision factors are reduced as the tower, {layout}": (
            ("dense", layout, "everything", None, False, {SP: False, AVERAGE: False}),
            ["gradients visual"],
            ["gradients language_model"],
        )
        for layout in ("tp2", "tp2+sp")
    },
    "router factors see this rank's tokens only": (
        ("moe", "tp2+sp", "router", None, False, {SP: False}),
        ["gradients mlp.gate.weight.lora_A", "gradients mlp.gate.weight.lora_B"],
        ["logits "],
    ),
    "expert factors are reduced over their own ranks": (
        ("moe", "ep2xdp2", "experts", None, True, {"allreduce": True}),
        ["gradients experts.gate_up_proj", "gradients experts.down_proj"],
        ["gradients self_attn"],
    ),
}
"""For each rule what is set wrong, and the parts and names that must be far off, or right."""


@pytest.mark.slow
@pytest.mark.parametrize("rule", FACTORS)
def test_factors_that_are_marked_wrongly(matrix: Matrix, monkeypatch: Any, rule: str) -> None:
    (model, layout, adapter, cut, expert, marks), wrong, right = FACTORS[rule]
    for mark, value in marks.items():
        marking(monkeypatch, cut, expert, mark, value)
    report = matrix.compare_row(MatrixRow.build(model, layout, "image", lora=adapter))
    for part, name in (one.rsplit(" ", 1) for one in wrong):
        assert worst(report, part, name) > FAR_OFF
    for part, name in (one.rsplit(" ", 1) for one in right):
        assert worst(report, part, name) < 2e-5


@pytest.mark.slow
def test_the_product_with_a_is_copied_into_tp(matrix: Matrix, monkeypatch: Any) -> None:
    nothing = (lambda x, group: x,) * 2
    monkeypatch.setitem(lora_modules._REGIONS, 0, nothing)
    report = matrix.compare_row(MatrixRow.build("dense", "tp2", "image", lora="mixed ranks"))
    assert worst(report, "gradients", "q_proj.weight.lora_A") > FAR_OFF
    assert worst(report, "gradients", "down_proj.weight.lora_B") > FAR_OFF  # its input is wrong
    assert worst(report, "logits") < 2e-5


@pytest.mark.slow
def test_the_gathered_product_is_summed_backwards(matrix: Matrix, monkeypatch: Any) -> None:
    """Each rank's rows of B give a part of the gradient of x A^T, so the parts must be summed."""
    slicing = partial(
        mappings.gather_from_sequence_parallel_region, tensor_parallel_output_grad=False
    )
    _, without = lora_modules._REGIONS[0]
    monkeypatch.setitem(lora_modules._REGIONS, 0, (slicing, without))
    report = matrix.compare_row(MatrixRow.build("dense", "tp2+sp", "image", lora="mixed ranks"))
    assert worst(report, "gradients", "up_proj.weight.lora_A") > FAR_OFF
    assert worst(report, "logits") < 2e-5


@pytest.mark.slow
def test_whole_expert_factors_are_summed_over_etp(matrix: Matrix, monkeypatch: Any) -> None:
    nothing = property(lambda self: lora_modules.same_region)
    monkeypatch.setattr(lora_modules.LinearKind, "region_of_undivided_factor", nothing)
    report = matrix.compare_row(MatrixRow.build("moe", "tp2xetp2+sp", "image", lora="experts"))
    assert worst(report, "gradients", "gate_up_proj.lora_A") > FAR_OFF
    assert worst(report, "gradients", "down_proj.lora_B") > FAR_OFF
    assert worst(report, "gradients", "gate_up_proj.lora_B") < 2e-5
    assert worst(report, "logits") < 2e-5


@pytest.mark.slow
def test_etp_cuts_gate_and_up_rows_apart(matrix: Matrix, monkeypatch: Any) -> None:
    """If ETP cut the fused rows in half, one half would be gate's alone."""
    joined = lora._join_rows

    def halves(rows: Any) -> Any:
        return joined(
            [slice(rows[0].start * 2, rows[0].start * 2 + sum(r.stop - r.start for r in rows))]
            if len(rows) == 2
            else rows
        )

    monkeypatch.setattr(lora, "_join_rows", halves)
    report = matrix.compare_row(
        MatrixRow.build("moe", "tp2xetp2+sp", "image", lora="gate and up of experts")
    )
    assert worst(report, "logits") > FAR_OFF


@pytest.mark.slow
def test_gathered_factors_are_waited_for(matrix: Matrix, monkeypatch: Any) -> None:
    """With overlap, a factor read without calling its owner has its value before the step."""
    monkeypatch.setattr(Pair, "__call__", lambda self: (self.lora_A, self.lora_B))
    report = matrix.compare_row(
        MatrixRow.build("dense", "dp2", "mixed", lora="mixed ranks", **OVERLAPPED)
    )
    assert worst(report, AFTER_STEP) > FAR_OFF
    assert worst(report, "parameters") < 2e-5
