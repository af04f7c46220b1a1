"""Factors start like PEFT's, with the same values under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.targets import resolve_targets
from mcore_qwen3vl.converters.live.export import save_adapter
from mcore_qwen3vl.converters.live.sharded import initialize_factors
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.build import build_chunks
from mcore_qwen3vl.model.lora.attach import attach
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import initialize
from mcore_qwen3vl.verify.parity.adapters import ADAPTERS

CONFIG = ADAPTERS["experts"]


def start(layout: Layout, hf: Path, targets: Any, folder: Path) -> None:
    initialize(layout)
    chunks = build_chunks(Architecture.from_hf(hf), layout)
    for chunk in chunks:
        attach(chunk, targets)
    initialize_factors(chunks, seed=7)
    save_adapter(chunks, folder / str(layout), config=CONFIG, hf_config=hf)


@pytest.fixture(scope="module")
def started(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder, targets = tmp_path_factory.mktemp("start"), resolve_targets(CONFIG, moe)
    for layout in (Layout(), Layout(tp=2, etp=2, sp=True)):
        run_layout(start, layout.world_size, layout, moe, targets, folder)
    return [load_file(f / "adapter_model.safetensors") for f in sorted(folder.iterdir())]


def test_every_layout_starts_from_the_same_values(started: list[dict[str, torch.Tensor]]) -> None:
    single, cut = started
    assert single.keys() == cut.keys()
    assert all(torch.equal(single[key], cut[key]) for key in single)


def test_a_is_uniform_and_b_zero(started: list[dict[str, torch.Tensor]]) -> None:
    for key, factor in started[0].items():
        if "lora_B" in key:
            assert not factor.any(), key
            continue
        bound = factor.shape[1] ** -0.5
        assert factor.abs().max() <= bound
        assert factor.abs().max() > 0.9 * bound
        assert factor.std() == pytest.approx(bound / 3**0.5, rel=0.15)
