"""The count of parameters that a LoRA run trains equals that of the model it builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.files import read_adapter
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.build import build_chunks
from mcore_qwen3vl.model.lora.adapt import adapt
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import initialize
from mcore_qwen3vl.training.memory import trained_parameters
from mcore_qwen3vl.verify.parity.adapters import ADAPTERS, write_random_adapter


def trained(hf: Path, adapter: Path) -> int:
    initialize(Layout())
    chunks = build_chunks(Architecture.from_hf(hf), Layout())
    choice = adapt(chunks, read_adapter(adapter, hf))
    for chunk in chunks:
        choice.apply(chunk)
    return sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)


@pytest.mark.parametrize("lora", ["experts", "whole router"])
def test_the_count_is_the_models(lora: str, moe: Path, tmp_path: Path) -> None:
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS[lora], moe)
    counts = trained_parameters(ADAPTERS[lora], moe)
    assert run_layout(trained, 1, moe, adapter) == [counts.total()]
    experts = sum(count for group, count in counts.items() if group.part == "experts")
    assert (experts > 0) == (lora == "experts")
