"""Parameters are counted by part, as Hugging Face's model has them."""

from __future__ import annotations

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.tiny import tiny_config
from tests.turns import slow


@pytest.mark.parametrize(
    "size",
    [
        *("2b", "4b", "8b", "32b", "30b_a3b"),
        *("qwen3.5_0.8b", "qwen3.5_9b", "qwen3.5_27b"),
        *slow("235b_a22b", "qwen3.5_35b_a3b"),
    ],
)
def test_parameters_are_those_of_the_hf_model(size: str) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(PUBLISHED / f"{size}.json")
        model = AutoModelForImageTextToText.from_config(config)
    a = Architecture.from_hf(PUBLISHED / f"{size}.json")
    assert parameters.total(a) == sum(p.numel() for p in model.parameters())
    assert parameters.count_by_kind(a)["vision"] == sum(
        p.numel() for p in model.model.visual.parameters()
    )


def test_active_parameters_are_those_of_the_experts_that_are_asked() -> None:
    a = Architecture.from_hf(PUBLISHED / "30b_a3b.json")
    idle = (a.num_experts - a.num_experts_per_tok) * 3 * a.hidden_size * a.moe_intermediate_size
    assert parameters.active(a) == parameters.total(a) - a.num_hidden_layers * idle
    dense = Architecture.from_hf(tiny_config())
    assert parameters.active(dense) == parameters.total(dense)


@pytest.mark.parametrize("mixed", [False, True])
def test_every_layer_has_its_own(mixed: bool) -> None:
    text = {"mlp_only_layers": [1]} if mixed else {}
    a = Architecture.from_hf(tiny_config(moe=True, text=text))
    held = parameters.count(a)
    for layer, moe in enumerate(a.moe_layers):
        parts = {group.kind for group in held if group.layer == layer}
        assert parts == {"attention", "norms", *(("router", "experts") if moe else ("mlp",))}
    assert {group.kind for group in held if group.layer is None} == {
        "vision", "embedding", "output layer", "norms",
    }  # fmt: skip
    divided = {group.kind for group in held if group.divided}
    assert not divided & {"vision", "norms", "router"}
    whole = {group.kind for group in held if not group.divided}
    assert not divided & whole
