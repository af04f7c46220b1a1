"""Mistakes in the plan of overlapped micro-batches show in the comparison with Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan

from mcore_qwen3vl.model import schedule_plan
from mcore_qwen3vl.model.decoder.layer import DeepStackLayer
from mcore_qwen3vl.verification.parity.matrix import EXPERTS, Matrix, MatrixRow
from tests.verification.parity.test_rules import FAR_OFF, worst

ROW = MatrixRow.build("moe", "ep2xdp2", "packed", **EXPERTS)
TRAVELS = MatrixRow.build("moe", "tp2xpp2xvpp2xep2+sp", "packed", **EXPERTS)
"""Features travel between chunks, and there are more micro-batches than warm-up passes."""


def test_it_runs_megatrons_combined_schedule(matrix: Matrix, monkeypatch: Any) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("combined schedule")

    monkeypatch.setattr(schedule_plan.SchedulePlan, "run", staticmethod(refuse))
    with pytest.raises(Exception, match="combined schedule"):
        matrix.compare_row(ROW)


def test_features_that_no_layer_adds(matrix: Matrix, monkeypatch: Any) -> None:
    monkeypatch.setattr(DeepStackLayer, "add_features", lambda self, hidden, *_: hidden)
    report = matrix.compare_row(ROW)
    assert worst(report, "logits") > FAR_OFF


@pytest.mark.slow
def test_features_that_a_layer_adds_twice(matrix: Matrix, monkeypatch: Any) -> None:
    add = DeepStackLayer.add_features

    def twice(self: Any, hidden: Any, context: Any, mask: Any) -> Any:
        hidden = add(self, hidden, context, mask)
        return add(self, hidden, context, mask) if self.layer_number == 3 else hidden

    monkeypatch.setattr(DeepStackLayer, "add_features", twice)
    assert worst(matrix.compare_row(ROW), "logits") > FAR_OFF


@pytest.mark.slow
def test_features_whose_gradient_is_dropped(matrix: Matrix, monkeypatch: Any) -> None:
    def dropping(self: Any, outputs: Any, gradients: Any) -> Any:
        self.default_backward_func(outputs, gradients)
        return gradients

    monkeypatch.setattr(schedule_plan._PreProcess, "_backward_of_both", dropping)
    report = matrix.compare_row(ROW)
    assert worst(report, "logits") < 2e-5
    assert worst(report, "gradients", "deepstack_merger_list") > FAR_OFF


@pytest.mark.slow
def test_features_whose_gradient_does_not_travel(matrix: Matrix, monkeypatch: Any) -> None:
    """Megatron sends the gradient of the first layer's input alone, before the embedding's."""

    def alone(self: Any, gradient: Any) -> Any:
        if self._received is None:
            return gradient
        self.backward(gradient)
        only = torch.zeros_like(self._received)
        only[: len(gradient)] = gradient
        return only

    monkeypatch.setattr(schedule_plan._PreProcess, "gradient_of_received", alone)
    report = matrix.compare_row(TRAVELS)
    assert worst(report, "logits") < 2e-5
    assert worst(report, "gradients", "deepstack_merger_list") > FAR_OFF


@pytest.mark.slow
def test_positions_of_the_other_micro_batch(matrix: Matrix, monkeypatch: Any) -> None:
    run = TransformerModelChunkSchedulePlan.run
    held: list[Any] = []

    def exchanged(forward: Any, *others: Any, **named: Any) -> Any:
        if forward is not None:
            forward_impl = forward.pre_process.forward_func

            def embed(*inputs: Any) -> Any:
                hidden = forward_impl(*inputs)
                held.append(forward.state.rotary_pos_emb)
                forward.state.rotary_pos_emb = held[0]
                return hidden

            forward.pre_process.forward_func = embed
        return run(forward, *others, **named)

    monkeypatch.setattr(TransformerModelChunkSchedulePlan, "run", staticmethod(exchanged))
    assert worst(matrix.compare_row(ROW), "logits") > FAR_OFF


@pytest.mark.slow
def test_a_final_norm_before_the_features_or_never(matrix: Matrix, monkeypatch: Any) -> None:
    """Megatron's plan leaves the norm out after a dense last layer."""
    forward = schedule_plan.PostProcessNode.forward_impl
    monkeypatch.setattr(schedule_plan._PostProcess, "forward_impl", forward)
    assert worst(matrix.compare_row(ROW), "logits") > FAR_OFF
