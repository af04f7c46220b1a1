"""The ``te`` spec equals HF in logits, loss, gradients and a step, in all layouts and batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.model.te.installed import require

require()

import torch  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

from mcore_qwen3vl.config import Architecture  # noqa: E402
from mcore_qwen3vl.errors import BadInput  # noqa: E402
from mcore_qwen3vl.layout import Layout  # noqa: E402
from mcore_qwen3vl.model.qwen3vl import build_chunks  # noqa: E402
from mcore_qwen3vl.runtime.launch import initialize, run_layout  # noqa: E402
from mcore_qwen3vl.verification.parity import on_rank  # noqa: E402
from mcore_qwen3vl.verification.parity.case import RECIPES, GlobalBatch, MicroBatch  # noqa: E402
from mcore_qwen3vl.verification.parity.comparison import verify_parity  # noqa: E402
from mcore_qwen3vl.verification.parity.matrix import Matrix, MatrixRow  # noqa: E402
from tests.model.te.kernels import gemm  # noqa: E402
from tests.model.te.rows import LORA_ROWS, ROWS, TORCH_ROWS, with_te  # noqa: E402
from tests.verification.parity.test_tf32 import rounded  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_hugging_face(matrix: Matrix, row: MatrixRow) -> None:
    report = matrix.compare_row(row)
    report.require()
    parts = {part for _, part in report.parts()}
    assert parts >= {"logits", "loss", "gradients"}
    assert ("parameters" in parts) == ("freeze" not in row.options and "dtype" not in row.options)


@pytest.mark.parametrize("row", TORCH_ROWS, ids=str)
def test_the_torch_spec_permutes_with_transformer_engine(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, row: MatrixRow
) -> None:
    matrix.compare_row(row).require()

    def refuse(*_: object) -> None:
        raise RuntimeError("its permutation")

    monkeypatch.setattr("transformer_engine.pytorch.triton.permutation.make_row_id_map", refuse)
    with pytest.raises(Exception, match="its permutation"):
        matrix.compare_row(row)


@pytest.mark.parametrize("layout", ["single", "cp2", "tp2xcp2+sp"])
def test_samples_that_end_in_padding(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Lengths and padded bounds may differ: the batch's tail padding belongs to the last sample.

    Passed to ring attention in this form, they gave NaN gradients from memory never written.
    """

    def packing(micro: MicroBatch) -> PackedSeqParams:
        assert micro.cu_seqlens is not None
        *starts, end = micro.cu_seqlens.tolist()
        lengths = torch.tensor([0, *(len(span.sample.input_ids) for span in micro.spans)])
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=lengths.cumsum(0).int(),
            cu_seqlens_q_padded=torch.tensor([*starts[:-1], end], dtype=torch.int32),
        )

    monkeypatch.setattr(on_rank, "_packed_seq_params", packing)
    matrix.compare_row(with_te(MatrixRow("dense", layout, ("packed",)))).require()


def test_all_batches_of_the_command(matrix: Matrix) -> None:
    """Without named batches, exactly those that the spec accepts are run."""
    report = verify_parity(matrix.reference("dense").path, spec="te", gradients=False)
    report.require()
    assert {f.context for f in report.findings} == {*RECIPES} - {"padded-left"}


def test_padding_on_the_left_is_refused(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity refuses it before it starts ranks, and the model where the mask is on the host."""
    row = MatrixRow("dense", "single", ("padded-left",), {"spec": "te"})
    with pytest.raises(BadInput, match="padded-left is padded on the left"):
        matrix.compare_row(row)
    monkeypatch.setattr(GlobalBatch, "padded_left", False)
    with pytest.raises(BadInput, match="pad there, or use the torch spec"):
        matrix.compare_row(row)


def test_rows_differ_and_all_have_the_te_spec() -> None:
    assert all(row.options["spec"] == "te" and row.batches for row in (*ROWS, *LORA_ROWS))
    assert len({str(row) for row in ROWS}) == len(ROWS)


SETTINGS = {"NVTE_TENSOR_HANDLE_POOL_SIZE_MB": "200", "NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
"""Environment variables that Transformer Engine reads, by name."""


def _built(path: Path) -> dict[str, str | None]:
    initialize(Layout())
    build_chunks(Architecture.from_hf(path), Layout(), spec="te")
    return {name: os.environ.get(name) for name in SETTINGS}


@pytest.mark.parametrize("chosen", [None, "0"])
def test_transformer_engine_gets_its_settings_unless_the_user_chose(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    """Every model gets them, whether training, parity, a benchmark or VERL builds it."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
        if chosen is not None:
            monkeypatch.setenv(name, chosen)
    expected = SETTINGS if chosen is None else dict.fromkeys(SETTINGS, chosen)
    assert run_layout(_built, 1, matrix.reference("dense").path) == [expected]


def test_the_torch_specs_router_multiplies_in_float32(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron would give it Transformer Engine's product, which runs in TF32 on a GPU."""
    product = gemm._product

    def in_tf32(left: torch.Tensor, transa: bool, right: torch.Tensor, transb: bool) -> Any:
        return product(rounded(left), transa, rounded(right), transb)

    monkeypatch.setattr(gemm, "_product", in_tf32)
    matrix.compare_row(MatrixRow("moe", "single", ("mixed",))).require()
