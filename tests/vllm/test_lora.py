"""vLLM serves our adapters as the merged model, or leaves out what is said of it beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-vllm makes an environment that has vLLM")

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.adapters.config import ATTENTION, MLP, AdapterConfig
from mcore_qwen3vl.converters.adapters.merge import merge
from mcore_qwen3vl.converters.adapters.vllm import vllm_notes
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verification.parity.case import ADAPTERS, VISION, write_random_adapter
from tests.vllm.conftest import InVllm, Models, Prompts
from tests.vllm.ours import TOLERANCE, answered_tokens, answers_of, differences, scored

# On the CPU vLLM 0.32 gives no log-probabilities of a prompt where its head may be adapted: its
# adapted head takes one row for each prompt. Here vLLM is told to adapt everything else, but for
# attn.proj: it knows modules by the last part of their names, and does not start when it is to
# adapt patch_embed.proj.
TOWER = ("attn.qkv", "linear_fc1", "linear_fc2")
NOT_THE_HEAD = [
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("qkv", "linear_fc1", "linear_fc2"),
]


def test_an_adapter_is_the_merged_model(
    models: Models, prompts: Prompts, in_vllm: InVllm, tmp_path: Path
) -> None:
    model = models("dense")
    configs = {
        "language": ADAPTERS["mixed ranks"],
        "vision": AdapterConfig(r=4, lora_alpha=6, target_modules=TOWER),
        "all": AdapterConfig(r=4, lora_alpha=6, target_modules=(*ATTENTION, *MLP, *TOWER)),
    }
    adapters = {
        name: write_random_adapter(tmp_path / name, config, model.exported)
        for name, config in configs.items()
    }
    found = in_vllm(
        model.exported,
        adapters,
        enable_lora=True,
        enable_tower_connector_lora=True,
        lora_target_modules=NOT_THE_HEAD,
    )
    base = scored(model.mcore, prompts, tmp_path)
    for name, adapter in adapters.items():
        merged = tmp_path / f"{name}-merged"
        merge(model.exported, adapter, merged)
        trained = {"lora": adapter, "layout": Layout.parse("tp2+sp")}
        for ours in (
            scored(merged, prompts, tmp_path),
            scored(model.mcore, prompts, tmp_path, **trained),
        ):
            off = differences(found[name], ours)
            print(name, {n: f"{d.absolute:.1e} of {d.scale:.0f}" for n, d in off.items()})
            assert max(one.relative for one in off.values()) < TOLERANCE, (name, off)
        assert answers_of(found[name]) == answered_tokens(merged, prompts)
        changed = differences(found[name], base)
        assert changed["image"].relative > 0.01, "the adapter changes nothing"


def test_what_is_refused_and_passed_over_is_what_was_said(
    models: Models, prompts: Prompts, in_vllm: InVllm, tmp_path: Path
) -> None:
    """By a server with nothing but LoRA switched on."""
    model = models("dense")
    head = AdapterConfig(r=16, lora_alpha=6, target_modules=("q_proj", "lm_head"))
    configs = {
        "head": head,
        "rank": replace(head, r=17),
        "vision": AdapterConfig(r=4, lora_alpha=6, target_modules=VISION),
        "whole": ADAPTERS["whole"],
    }
    adapters = {
        name: write_random_adapter(tmp_path / name, config, model.exported)
        for name, config in configs.items()
    }
    architecture = Architecture.from_hf(model.exported)
    notes = {
        name: " ".join(vllm_notes(read_adapter(adapter, model.exported), architecture))
        for name, adapter in adapters.items()
    }
    found = in_vllm(model.exported, {"": None, **adapters}, score=False, enable_lora=True)

    assert not notes["head"]
    merge(model.exported, adapters["head"], tmp_path / "merged")
    assert answers_of(found["head"]) == answered_tokens(tmp_path / "merged", prompts)
    assert answers_of(found["head"]) != answers_of(found[""])

    assert "vLLM needs max_lora_rank 32 for rank 17" in notes["rank"]
    assert "max_lora_rank" in found["rank"]
    assert "vLLM ignores the 28 adapted parameters" in notes["vision"]
    assert answers_of(found["vision"]) == answers_of(found[""])
    assert "vLLM refuses adapters with modules_to_save" in notes["whole"]
    assert "modules_to_save" in found["whole"]
