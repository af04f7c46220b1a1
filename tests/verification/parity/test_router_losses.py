"""The comparison of the routers' losses: its reference is Hugging Face's, and it sees mistakes.

HF's ``load_balancing_loss_func`` multiplies the share of choices by the mean probability over the
tokens of all layers together; Megatron does so for each layer, and divides by top-k. The rows with
these losses are in the matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.router import BalancedRouter
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.parity.case import ParityCase, RouterLosses, build_batch
from mcore_qwen3vl.verification.parity.comparison import compare_case
from mcore_qwen3vl.verification.parity.reference import Reference, ReferenceCheckpoint
from tests.turns import slow_except

AUX, Z = 0.3, 0.05


@pytest.fixture(scope="module")
def one_moe_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "one-moe-layer"
    return write_tiny_checkpoint(path, moe=True, text={"mlp_only_layers": [0, 1, 3]})


def run(path: Path, layout: str, batches: list[str], **config: Any) -> Any:
    return compare_case(
        ReferenceCheckpoint(path), ParityCase(Layout.parse(layout), config=config), batches
    )


def test_the_references_balancing_loss_is_that_of_hugging_faces_model(one_moe_layer):
    """With one MoE layer and one sample they are equal, up to the factor of top-k."""
    reference = Reference(one_moe_layer)
    batch = build_batch("text", reference.architecture)
    coefficient, top_k = AUX, reference.architecture.num_experts_per_tok
    ours = reference.compute_expected(
        batch, router_losses=RouterLosses("aux_loss", coefficient * top_k, 0.0)
    ).gradients
    model = AutoModelForImageTextToText.from_pretrained(one_moe_layer, dtype=torch.float32)
    model.config.text_config.router_aux_loss_coef = coefficient
    for micro in batch.micro_batches:
        output = model(micro.input_ids, output_router_logits=True)
        counted = output.logits.log_softmax(-1).gather(-1, micro.labels[..., None])[..., 0]
        loss = -(counted * micro.loss_mask).sum()
        (loss + coefficient * output.aux_loss * micro.input_ids.numel()).backward()
    name = "model.language_model.layers.2.mlp.gate.weight"
    expected: Tensor = model.get_parameter(name).grad / batch.tokens
    torch.testing.assert_close(ours[name], expected, rtol=0, atol=2e-6 * expected.abs().max())


@pytest.mark.parametrize("layout", slow_except(["tp2+sp", "cp2xep2"], "cp2xep2"))
def test_a_ranks_own_tokens_as_the_weight_would_be_seen(one_moe_layer, layout, monkeypatch):
    """Megatron weighs each rank's part by its own valid tokens, which differ with padding."""
    monkeypatch.setattr(BalancedRouter, "_apply_aux_loss", TopKRouter._apply_aux_loss)
    report = run(one_moe_layer, layout, ["padded", "packed"], moe_aux_loss_coeff=AUX)
    wrong = {f.context: f for f in report.failures if "mlp.gate.weight" in f.name}
    print("observed errors:", {name: f"{f.relative_error:.2e}" for name, f in wrong.items()})
    assert wrong.keys() == {"padded", "packed"}


def test_a_global_loss_without_the_ranks_number_would_be_seen(one_moe_layer, monkeypatch):
    """Megatron divides it by the data-parallel ranks twice."""
    own = "_apply_global_aux_loss"
    monkeypatch.setattr(BalancedRouter, own, getattr(TopKRouter, own))
    losses = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": AUX}
    report = run(one_moe_layer, "dp4", ["text"], **losses)
    assert any("mlp.gate.weight" in failure.name for failure in report.failures)


def test_padding_in_the_routers_losses_would_be_seen(one_moe_layer, monkeypatch):
    monkeypatch.setattr(Qwen3VLModel, "_router_padding", lambda *arguments: None)
    batches = ["padded", "padded-left", "packed"]
    report = run(one_moe_layer, "single", batches, moe_z_loss_coeff=Z)
    wrong = {f.context: f for f in report.failures if "mlp.gate.weight" in f.name}
    print("observed errors:", {name: f"{f.relative_error:.2e}" for name, f in wrong.items()})
    assert wrong.keys() == set(batches)


@pytest.mark.parametrize("loss", ["moe_aux_loss_coeff", "moe_z_loss_coeff"])
def test_a_wrong_coefficient_would_be_seen(one_moe_layer, loss, monkeypatch):
    losses = RouterLosses("aux_loss", AUX, Z)
    monkeypatch.setattr(ParityCase, "router_losses", losses)
    exact = {"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}
    report = run(one_moe_layer, "single", ["mixed"], **exact | {loss: exact[loss] + 1e-3})
    assert any("mlp.gate.weight" in failure.name for failure in report.failures)
