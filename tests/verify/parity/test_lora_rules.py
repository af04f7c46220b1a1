"""Each gradient rule of LoRA matters: if it is broken deliberately, the comparison fails.

Ranks are forked from this process, so a function replaced here is replaced there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from megatron.core.tensor_parallel import mappings

from mcore_qwen3vl.model import lora, lora_modules
from mcore_qwen3vl.model.lora_modules import Pair
from mcore_qwen3vl.verify.parity.matrix import OVERLAPPED, Matrix, MatrixRow
from mcore_qwen3vl.verify.parity.reference import AFTER_STEP
from tests.verify.parity.test_rules import FAR_OFF, worst

pytestmark = pytest.mark.slow


def marking(monkeypatch: Any, cut: int | None, expert: bool, mark: str, value: Any) -> None:
    """Set one mark of all factors of one kind of linear to a wrong value."""
    original = lora_modules.Kind.mark

    def wrong(self: lora_modules.Kind, pair: Pair, weight: Any) -> None:
        original(self, pair, weight)
        if self.partition_dim == cut and self.expert == expert:
            for factor in (pair.lora_A, pair.lora_B):
                if hasattr(factor, mark):
                    setattr(factor, mark, value)

    monkeypatch.setattr(lora_modules.Kind, "mark", wrong)


def test_the_product_with_a_is_copied_into_tp(matrix: Matrix, monkeypatch: Any) -> None:
    nothing = (lambda x, group: x,) * 2
    monkeypatch.setitem(lora_modules._REGIONS, 0, nothing)
    report = matrix.compare_row(MatrixRow.build("dense", "tp2", "image", lora="mixed ranks"))
    assert worst(report, "gradients", "q_proj.weight.lora_A") > FAR_OFF
    assert worst(report, "gradients", "down_proj.weight.lora_B") > FAR_OFF  # its input is wrong
    assert worst(report, "logits") < 2e-5


def test_a_beside_a_column_is_summed_over_tp(matrix: Matrix, monkeypatch: Any) -> None:
    marking(monkeypatch, 0, False, "sequence_parallel", False)
    report = matrix.compare_row(MatrixRow.build("dense", "tp2+sp", "image", lora="mixed ranks"))
    assert worst(report, "gradients", "gate_proj.weight.lora_A") > FAR_OFF
    assert worst(report, "gradients", "gate_proj.weight.lora_B") < 2e-5
    assert worst(report, "logits") < 2e-5


def test_b_beside_a_row_is_summed_over_tp(matrix: Matrix, monkeypatch: Any) -> None:
    marking(monkeypatch, 1, False, "sequence_parallel", False)
    report = matrix.compare_row(MatrixRow.build("dense", "tp2+sp", "image", lora="mixed ranks"))
    assert worst(report, "gradients", "o_proj.weight.lora_B") > FAR_OFF
    assert worst(report, "gradients", "o_proj.weight.lora_A") < 2e-5
    assert worst(report, "logits") < 2e-5


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


def test_a_cut_factor_is_counted_on_every_rank(matrix: Matrix, monkeypatch: Any) -> None:
    marking(monkeypatch, 0, False, "tensor_model_parallel", False)
    report = matrix.compare_row(MatrixRow.build("dense", "tp2", "image", lora="mixed ranks"))
    assert worst(report, "gradient norm") > FAR_OFF
    assert worst(report, "gradients") < 2e-5


@pytest.mark.parametrize("layout", ["tp2", "tp2+sp"])
def test_vision_factors_are_reduced_as_the_tower(
    matrix: Matrix, monkeypatch: Any, layout: str
) -> None:
    """Frames are divided over TP: a rank's gradient is a part, or twice a part without SP."""
    for mark in ("sequence_parallel", "average_gradients_across_tp_domain"):
        marking(monkeypatch, None, False, mark, False)
    report = matrix.compare_row(MatrixRow.build("dense", layout, "image", lora="everything"))
    assert worst(report, "gradients", "visual") > FAR_OFF
    assert worst(report, "gradients", "language_model") < 2e-5


def test_router_factors_see_this_ranks_tokens_only(matrix: Matrix, monkeypatch: Any) -> None:
    marking(monkeypatch, None, False, "sequence_parallel", False)
    report = matrix.compare_row(MatrixRow.build("moe", "tp2+sp", "image", lora="router"))
    assert worst(report, "gradients", "mlp.gate.weight.lora_A") > FAR_OFF
    assert worst(report, "gradients", "mlp.gate.weight.lora_B") > FAR_OFF
    assert worst(report, "logits") < 2e-5


def test_expert_factors_are_reduced_over_their_own_ranks(matrix: Matrix, monkeypatch: Any) -> None:
    marking(monkeypatch, None, True, "allreduce", True)
    report = matrix.compare_row(MatrixRow.build("moe", "ep2xdp2", "image", lora="experts"))
    assert worst(report, "gradients", "experts.gate_up_proj") > FAR_OFF
    assert worst(report, "gradients", "experts.down_proj") > FAR_OFF
    assert worst(report, "gradients", "self_attn") < 2e-5


def test_whole_expert_factors_are_summed_over_etp(matrix: Matrix, monkeypatch: Any) -> None:
    nothing = property(lambda self: lora_modules.same_region)
    monkeypatch.setattr(lora_modules.Kind, "undivided_region", nothing)
    report = matrix.compare_row(MatrixRow.build("moe", "tp2xetp2+sp", "image", lora="experts"))
    assert worst(report, "gradients", "gate_up_proj.lora_A") > FAR_OFF
    assert worst(report, "gradients", "down_proj.lora_B") > FAR_OFF
    assert worst(report, "gradients", "gate_up_proj.lora_B") < 2e-5
    assert worst(report, "logits") < 2e-5


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


def test_gathered_factors_are_waited_for(matrix: Matrix, monkeypatch: Any) -> None:
    """With overlap, a factor read without calling its owner has its value before the step."""
    monkeypatch.setattr(Pair, "__call__", lambda self: (self.lora_A, self.lora_B))
    report = matrix.compare_row(
        MatrixRow.build("dense", "dp2", "mixed", lora="mixed ranks", **OVERLAPPED)
    )
    assert worst(report, AFTER_STEP) > FAR_OFF
    assert worst(report, "parameters") < 2e-5
