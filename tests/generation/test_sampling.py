"""Tokens are drawn as Hugging Face draws them; values that cannot be used are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, GenerationConfig

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.sampling import Sampler, stop_tokens
from mcore_qwen3vl.layout import Layout
from tests.generation.cases import (
    NEW_TOKENS,
    answer,
    checkpoint,
    conversations,
    expected,
    hugging_face_inputs,
    hugging_face_model,
)


def test_draws_equal_hugging_face_with_the_same_seed() -> None:
    options = {"temperature": 1.3, "top_p": 0.9, "top_k": 40}
    conversation = conversations("image")[0]
    inputs = hugging_face_inputs(AutoProcessor.from_pretrained(checkpoint("dense")), conversation)
    torch.manual_seed(7)
    out = hugging_face_model("dense").generate(
        **inputs, do_sample=True, max_new_tokens=NEW_TOKENS, **options
    )
    want = out[0, inputs["input_ids"].shape[1] :].tolist()
    for layout in (Layout(), Layout(tp=2, sp=True)):
        for rank in answer("dense", [[conversation]], layout, seed=7, **options):
            assert rank[0][0].token_ids == want
    assert want != expected("dense", "image").tokens[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_k": -1}, "top_k"),
        ({"top_p": 0.5}, "set a temperature"),
        ({"temperature": float("nan")}, "temperature is nan: use 0 for greedy"),
    ],
)
def test_sampling_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Sampler(GenerationConfig(), **options)


def test_a_temperature_may_be_a_whole_number() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    ids = torch.zeros(1, 1, dtype=torch.int64)
    whole = Sampler(GenerationConfig(), temperature=2).processors(ids, logits)
    assert whole.equal(Sampler(GenerationConfig(), temperature=2.0).processors(ids, logits))
    assert whole.equal(logits / 2)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1.0},
        {"temperature": "0.7"},
        {"top_p": 2.0},
        {"top_k": -1},
        {"repetition_penalty": -1.0},
    ],
)
def test_a_generation_config_that_cannot_be_used_is_refused(given: dict[str, Any]) -> None:
    config = GenerationConfig(do_sample=True)
    vars(config).update(given)
    with pytest.raises(BadInput, match=r"generation_config\.json cannot be used: "):
        Sampler(config)
    vars(config).update(eos_token_id=["end"])
    with pytest.raises(BadInput, match=r"eos_token_id of generation_config\.json is \['end'\]"):
        stop_tokens(config, SimpleNamespace(eos_token_id=None))
