"""Chunks of one rank, and their comparison with HF's tensors by parameter name.

The table is not used, so that an error in it cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.live import load_hf
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from tests.converters.checkpoints import load
from tests.model import weights


def build_empty(layout: Layout, architecture: Architecture, **overrides: Any) -> list[Any]:
    """Build this rank's pipeline chunks, full of NaN, so that unloaded parameters show."""
    from mcore_qwen3vl.model.qwen3vl import build_chunks

    chunks = build_chunks(architecture, layout, **overrides)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    return chunks


def check_chunks(chunks: list[Any], source: Path) -> int:
    """Compare every parameter with the HF checkpoint `source`, and return their number."""
    hf = load(source)
    if Architecture.from_hf(source).expert_layout == "published":
        hf |= {name: one.transpose(1, 2) for name, one in hf.items() if ".mlp.experts." in name}
    compared = 0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            _, want = weights.local(chunk, name, hf)
            assert parameter.dtype == want.dtype, name
            assert torch.equal(parameter.detach(), want), name
            compared += 1
    return compared


def on_ranks(path: Path, text: str, work: Callable[[list[Any]], Any]) -> list[Any]:
    """Return what `work` returns on each rank, given its loaded chunks."""
    layout = Layout.parse(text)

    def on_rank() -> Any:
        initialize(layout)
        chunks = build_empty(layout, Architecture.from_hf(path))
        load_hf(chunks, path)
        return work(chunks)

    return run_layout(on_rank, layout.world_size, timeout=60)
