"""The router's auxiliary losses equal Hugging Face's, where the two define the same.

HF's ``load_balancing_loss_func`` multiplies the share of choices by the mean probability over the
tokens of all layers together; Megatron does so for each layer. With one MoE layer they are equal
up to a factor of top-k, by which Megatron divides. With one sample a micro-batch, the tokens are
the same, too. In per-token mode Megatron weights a micro-batch's loss by its tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.parity.comparison import compare_case
from mcore_qwen3vl.verify.parity.on_rank import Engine
from mcore_qwen3vl.verify.parity.reference import Reference, ReferenceCheckpoint
from tests.turns import slow_except

AUX, Z = 0.3, 0.05
"""Coefficients far above those in use, so that an error in a loss shows in the gradients."""


class WithRouterLosses(Reference):
    """HF's model with its own balancing loss, and the z-loss of Zoph et al., "ST-MoE", 2022."""

    aux, z = 0.0, 0.0

    def added_loss(self, output: Any) -> Tensor | float:
        logits = output.router_logits  # (L, E) for each MoE layer
        a = self.architecture
        balance = load_balancing_loss_func(logits, a.num_experts, a.num_experts_per_tok)
        tokens = len(logits[0])
        z = sum(layer.logsumexp(-1).square().sum() for layer in logits)
        return self.aux * balance * tokens + self.z * z


class ReferenceWithRouterLosses(ReferenceCheckpoint):
    def __init__(self, path: Path, aux: float, z: float) -> None:
        super().__init__(path)
        reference = WithRouterLosses(path)
        reference.aux, reference.z = aux, z
        self._models[torch.float32] = reference


@pytest.fixture(scope="module")
def one_moe_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("router") / "one-moe-layer"
    return write_tiny_checkpoint(path, moe=True, text={"mlp_only_layers": [0, 1, 3]})


def run(path: Path, layout: str, aux: float, z: float, batches: list[str], **options: Any) -> Any:
    config = {}
    if aux:  # Megatron's definition divides by top-k
        top_k = ReferenceCheckpoint(path).architecture.num_experts_per_tok
        config["moe_aux_loss_coeff"] = aux * top_k
    if z:
        config["moe_z_loss_coeff"] = z
    case = Case(Layout.parse(layout), config=config, **options)
    return compare_case(ReferenceWithRouterLosses(path, aux, z), case, batches)


LAYOUTS = ["single", "tp2+sp", "cp2xep2", "ep2xdp2", "pp2xep2xdp2"]


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "tp2+sp"))
def test_the_balancing_loss_is_hugging_faces(one_moe_layer, layout):
    run(one_moe_layer, layout, AUX, 0.0, ["mixed"]).require()


@pytest.mark.parametrize("layout", slow_except(["tp2+sp", "cp2xep2"], "cp2xep2"))
def test_the_balancing_loss_weighs_a_ranks_own_tokens(one_moe_layer, layout, monkeypatch):
    """It does so with a padding mask, as in training; here nothing is padded, as HF requires.

    Megatron took the number of tokens of the whole TP x CP group for the rank's own.
    """
    arguments = Engine._model_arguments

    def masked(self: Engine, micro: Any) -> dict[str, Any]:
        none = torch.zeros_like(micro.input_ids, dtype=torch.bool)
        return {**arguments(self, micro), "padding_mask": none}

    monkeypatch.setattr(Engine, "_model_arguments", masked)
    run(one_moe_layer, layout, AUX, 0.0, ["mixed"]).require()


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "cp2xep2"))
def test_the_z_loss_is_the_mean_squared_logsumexp(one_moe_layer, layout):
    run(one_moe_layer, layout, 0.0, Z, ["mixed"]).require()


@pytest.mark.parametrize("layout", slow_except(["single", "tp2+sp", "cp2xep2"], "single"))
def test_padding_has_no_part_in_the_z_loss(one_moe_layer, layout):
    """This holds for padding beside a sample and at the tail of a pack."""
    run(one_moe_layer, layout, 0.0, Z, ["padded", "padded-left", "packed"]).require()


def test_padding_has_no_part_in_the_z_loss_beside_another_micro_batch(one_moe_layer):
    """Megatron's plan of overlapped micro-batches does not pass the mask to the router."""
    run(one_moe_layer, "ep2xdp2", 0.0, Z, ["padded", "packed"], overlap_experts=True).require()


@pytest.mark.slow
def test_padding_in_the_z_loss_would_be_seen(one_moe_layer, monkeypatch):
    monkeypatch.setattr(Qwen3VLModel, "_router_padding", lambda *arguments: None)
    report = run(one_moe_layer, "single", 0.0, Z, ["padded", "padded-left", "packed"])
    wrong = {f.context: f for f in report.failures if "mlp.gate.weight" in f.name}
    print("observed errors:", {name: f"{f.relative_error:.2e}" for name, f in wrong.items()})
    assert wrong.keys() == {"padded", "padded-left", "packed"}


@pytest.mark.parametrize("loss", slow_except(["aux", "z"], "z"))
def test_a_wrong_coefficient_would_be_seen(one_moe_layer, loss):
    reference = ReferenceWithRouterLosses(one_moe_layer, 0.0, 0.0)
    setattr(reference.model(), loss, 1e-3)
    report = compare_case(reference, Case(Layout()), ["mixed"])
    assert any("mlp.gate.weight" in failure.name for failure in report.failures)


def test_several_layers_are_balanced_one_by_one(tmp_path):
    """The documented difference holds: HF averages over the layers first, so the sums differ."""
    path = write_tiny_checkpoint(tmp_path / "two", moe=True, text={"mlp_only_layers": [0, 1]})
    report = run(path, "single", AUX, 0.0, ["mixed"])
    assert not report.ok

    def layer_by_layer(self: Any, output: Any) -> Tensor:
        a = self.architecture
        losses = [
            load_balancing_loss_func((layer,), a.num_experts, a.num_experts_per_tok)
            for layer in output.router_logits
        ]
        return torch.stack(losses).sum() * AUX * len(output.router_logits[0])

    reference = ReferenceWithRouterLosses(path, AUX, 0.0)
    reference.model().added_loss = layer_by_layer.__get__(reference.model())
    top_k = reference.architecture.num_experts_per_tok
    compare_case(reference, Case(config={"moe_aux_loss_coeff": AUX * top_k}), ["mixed"]).require()
