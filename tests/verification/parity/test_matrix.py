"""Logits, loss, gradients and an optimizer step equal HF's in every layout and kind of batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder import attention
from mcore_qwen3vl.verification.parity.case import RECIPES
from mcore_qwen3vl.verification.parity.comparison import verify_parity
from mcore_qwen3vl.verification.parity.matrix import MATRIX, Matrix, MatrixRow
from mcore_qwen3vl.verification.parity.reference import AFTER_STEP

FAST: dict[str, tuple[str, ...]] = {
    "dense tp2xcp2+sp": ("packed", "padded-left"),
    "dense pp2+E|t|tt|tL": ("mixed", "ragged"),
    "dense dp2 distr. opt., overlap": ("imageless",),
    "dense pp2xvpp2": ("imageless", "packed"),
    "tied pp2xvpp2xdp2 distr. opt., overlap": ("imageless",),
    "epsilon single": ("mixed",),
    "yarn cp2": ("video", "packed"),
    "moe ep2xdp2 allgather": ("packed",),
    "moe tp2xep2+sp": ("text", "image", "images", "padded"),
    "moe cp2xep2": ("video", "packed"),
    "moe tp2xetp2+sp": ("mixed",),
    "moe pp2xvpp2xep2xdp2 overlapped experts": ("ragged",),
    "moe cp2xep2 router losses": ("padded",),
    "moe tp2+sp router losses by row": ("padded",),
    "moe-mixed ep2xdp2 overlapped experts": ("packed",),
    "dense pp2xvpp2 recompute uniform 1": ("packed",),
    "dense tp2xpp2+sp recompute block": ("packed",),
    "dense cp2 recompute selective": ("mixed",),
    "dense tp2+sp recompute vision": ("mixed",),
    "moe ep2xdp2 recompute selective moe": ("packed",),
    "dense tp2xcp2+sp all kept": ("packed",),
    "tied dp2 Megatron's loss": ("imageless",),
    "moe ep2xdp2 one expert after another": ("packed",),
    "dense tp2+sp vision frozen": ("mixed",),
    "dense pp2 language frozen": ("mixed",),
    "moe ep2xdp2 patterns frozen, overlap": ("mixed",),
    "moe-all tp2xep2+sp bf16": ("packed",),
    "qwen3.5 tp2": ("mixed", "padded-left"),
    "qwen3.5-tied cp2 fp64": ("packed",),
    "qwen3.5-moe tp2xep2+sp router losses": ("packed",),
    "qwen3.5-text tp2+sp recompute uniform 1": ("mixed",),
    "qwen3.5-text-tied pp2xvpp2xdp2 distr. opt., overlap": ("packed",),
    "qwen3.5-text-moe cp2xep2 fp64": ("packed",),
}
"""Rows with each kind of parallelism, model and option once, on two ranks where they suffice, and
the batches that they run. The slow tests and `make parity` run all rows with all their batches."""

SHORT = [replace(row, batches=FAST[str(row)]) for row in MATRIX if str(row) in FAST]
ROWS = [
    *(pytest.param(row, id=str(row)) for row in SHORT),
    *(
        pytest.param(row, id=f"{row}, all batches", marks=pytest.mark.slow)
        for row in MATRIX
        if row not in SHORT
    ),
]


@pytest.mark.parametrize("row", ROWS)
def test_equals_hugging_face(matrix: Matrix, row: MatrixRow) -> None:
    report = matrix.compare_row(row)
    report.require()
    compared = {part for _, part in report.parts()}
    expected = {"logits", "loss", "gradients"}
    if "freeze" not in row.options and "dtype" not in row.options:
        expected |= {"parameters", "gradient norm"}
        if row.options.get("overlap") and row.options.get("distributed_optimizer"):
            expected |= {AFTER_STEP}
    assert compared == expected


def test_float64_tells_another_function_from_rounding(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = attention.rotate
    monkeypatch.setattr(attention, "rotate", lambda *inputs: exact(*inputs) * (1 + 1e-8))
    assert matrix.compare_row(MatrixRow("dense", "single", ("text",))).ok
    report = matrix.compare_row(MatrixRow("dense", "single", ("text",), {"dtype": "fp64"}))
    assert {part for _, part in report.parts()} == {"logits", "loss", "gradients"}
    assert all(summary.failed for summary in report.parts().values())


def test_fast_rows_have_every_model_batch_and_option() -> None:
    assert len(SHORT) == len(FAST)
    rows = {str(row): row for row in MATRIX}
    assert all({*row.batches} <= {*rows[str(row)].batches} for row in SHORT)
    assert {row.model for row in SHORT} == {row.model for row in MATRIX}
    assert {batch for row in SHORT for batch in row.batches} == set(RECIPES)
    assert {name for row in SHORT for name in row.options} == {
        name for row in MATRIX for name in row.options if name != "compile_pointwise"
    }  # compile_pointwise takes half a minute in the C++ compiler
    for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp"):
        assert any(getattr(Layout.parse(row.layout), name) > 1 for row in SHORT), name


def test_the_matrix_has_every_layout_and_every_batch() -> None:
    layouts = [Layout.parse(row.layout) for row in MATRIX]
    sizes = {(name, getattr(x, name)) for x in layouts for name in ("tp", "pp", "cp", "ep", "dp")}
    assert sizes >= {("tp", 4), ("pp", 4), ("cp", 4), ("ep", 4), ("dp", 4)}
    assert sizes >= {(name, n) for name in ("tp", "pp", "cp", "ep", "dp") for n in (1, 2)}
    assert any(x.etp == 2 for x in layouts)
    assert any(x.world_size == 8 for x in layouts)
    # Each batch meets sequence, context, pipeline, expert and data parallelism.
    for batch in RECIPES:
        met = [Layout.parse(e.layout) for e in MATRIX if batch in e.batches]
        for name in ("tp", "cp", "pp", "ep", "dp"):
            assert any(getattr(layout, name) > 1 for layout in met), (batch, name)
        assert any(layout.sp for layout in met), batch


@pytest.mark.parametrize(
    ("frozen", "gone", "kept"),
    [
        (("vision",), "model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.norm.weight"),
        (("aligner",), "model.visual.merger.norm.weight", "model.visual.patch_embed.proj.bias"),
        (("language",), "lm_head.weight", "model.visual.blocks.0.attn.qkv.weight"),
        (
            (r"decoder\.layers\.2\.self_attention",),
            "model.language_model.layers.2.self_attn.q_proj.weight",
            "model.language_model.layers.1.self_attn.q_proj.weight",
        ),
    ],
)
def test_a_frozen_parameter_has_no_gradient_and_the_others_keep_theirs(
    matrix: Matrix, frozen: tuple[str, ...], gone: str, kept: str
) -> None:
    report = matrix.compare_row(MatrixRow("dense", "pp2", ("mixed",), {"freeze": frozen}))
    report.require()
    names = {finding.name for finding in report.findings if finding.part == "gradients"}
    assert gone not in names
    assert kept in names


def test_verify_parity_judges_a_checkpoint(matrix: Matrix) -> None:
    path = matrix.reference("dense").path
    report = verify_parity(path, None, ["image"], timeout=60)
    assert report.ok
    assert {part for _, part in report.parts()} == {
        "logits", "loss", "gradients", "parameters", "gradient norm",
    }  # fmt: skip
    forward = verify_parity(path, None, ["text"], gradients=False, timeout=60)
    assert forward.ok
    assert {part for _, part in forward.parts()} == {"logits", "loss"}
    half = verify_parity(path, Layout(tp=2, sp=True), ["text"], dtype="bf16", timeout=60)
    assert half.ok
    assert all(1e-3 < finding.tolerance < 0.2 for finding in half.findings)


def test_a_model_that_bf16_cannot_judge_is_refused(matrix: Matrix) -> None:
    """Rounding sends tokens to other experts, so that twice its effect allows gradients of zero."""
    with pytest.raises(BadInput, match=r"own \w+ differ by \d+% .*--dtype fp32"):
        verify_parity(matrix.reference("moe").path, None, ["text"], dtype="bf16", timeout=60)


def test_what_cannot_run_is_refused_before_it_starts(matrix: Matrix) -> None:
    path = matrix.reference("dense").path
    with pytest.raises(BadInput, match="8 attention heads cannot be divided over TP 3"):
        verify_parity(path, Layout(tp=3), ["text"])
    with pytest.raises(BadInput, match="no batch called 'nonsense'"):
        verify_parity(path, None, ["nonsense"])
    with pytest.raises(BadInput, match=r"4 micro-batches .* DP 3"):
        verify_parity(path, Layout(dp=3), ["text"])
