"""The count of parameters that a LoRA run trains equals that of the model it builds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, apply, resolve_targets
from mcore_qwen3vl.converters.mapping.parameters import Group
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.lora import adapt
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.training.memory import trained_parameters
from mcore_qwen3vl.verify.parity.case import ADAPTERS, write_random_adapter


def trained(hf: Path, adapter: Path) -> int:
    initialize(Layout())
    chunks = build_chunks(Architecture.from_hf(hf), Layout())
    choice = adapt(chunks, read_adapter(adapter, hf))
    for chunk in chunks:
        choice.apply(chunk)
    return sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)


def counted(config: AdapterConfig, hf: Path, *, tied: bool) -> Counter[Group]:
    return trained_parameters(resolve_targets(config, hf), apply(config, hf).saved, tied=tied)


@pytest.mark.parametrize("lora", ["experts", "whole router"])
def test_the_count_is_the_models(lora: str, moe: Path, tmp_path: Path) -> None:
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS[lora], moe)
    counts = counted(ADAPTERS[lora], moe, tied=False)
    assert run_layout(trained, 1, moe, adapter) == [counts.total()]
    experts = sum(count for group, count in counts.items() if group.part == "experts")
    assert (experts > 0) == (lora == "experts")


def test_a_head_that_is_tied_to_the_embedding_counts_once(tmp_path: Path) -> None:
    hf = write_tiny_checkpoint(tmp_path / "model", tie=True)
    names = {"target_modules": ("q_proj",), "modules_to_save": ("embed_tokens",)}
    config = AdapterConfig(r=2, lora_alpha=4, ensure_weight_tying=True, **names)
    adapter = write_random_adapter(tmp_path / "adapter", config, hf)
    assert run_layout(trained, 1, hf, adapter) == [counted(config, hf, tied=True).total()]
