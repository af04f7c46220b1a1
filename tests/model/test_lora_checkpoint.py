"""Adapter-only checkpoints saved under one layout load bit for bit under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.live import factor_parts, hf_parts
from mcore_qwen3vl.converters.torch_pickle import guard_reads
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.lora import adapt, trained_names, whole_tensors
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.verification.parity.matrix import Matrix
from mcore_qwen3vl.verification.parity.reference import ReferenceCheckpoint
from tests.turns import slow


def adapted(layout: Layout, reference: ReferenceCheckpoint) -> list[Qwen3VLModel]:
    initialize(layout)
    chunks = build_chunks(Architecture.from_hf(reference.path), layout)
    choice = adapt(chunks, reference.adapter)
    for chunk in chunks:
        choice.apply(chunk)
    choice.check()
    return chunks


def trained(chunks: list[Qwen3VLModel]) -> dict[str, Any]:
    """Return the state that a run saves: see ``training.lora.run.keep_trained``."""
    state = {}
    for i, chunk in enumerate(chunks):
        names = trained_names(chunk)
        state[f"model{i}"] = {k: v for k, v in chunk.sharded_state_dict().items() if k in names}
    return state


def save(layout: Layout, reference: ReferenceCheckpoint, folder: Path) -> int:
    chunks = adapted(layout, reference)
    state = trained(chunks)
    dist_checkpointing.save(state, str(folder))
    return sum(len(of_chunk) for of_chunk in state.values())


def load(layout: Layout, reference: ReferenceCheckpoint, folder: Path) -> tuple[int, list[str]]:
    """Return how many values this rank loaded, and the names of parts unlike `reference`'s."""
    chunks = adapted(layout, reference)
    adapter = reference.adapter
    expected: dict[str, Tensor] = dict(whole_tensors(adapter))
    for name, factors in adapter.factors.items():
        expected |= {f"{name}.lora_A": factors.a, f"{name}.lora_B": factors.b}
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    parameter.fill_(torch.nan)
    guard_reads()
    loaded, extra, lacking = dist_checkpointing.load(
        trained(chunks), str(folder), strict=StrictHandling.RETURN_ALL
    )
    assert not lacking
    assert not extra
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"])
    count, wrong = 0, []
    for part in [*hf_parts(chunks, expert_layout="v5"), *factor_parts(chunks)]:
        if part.name in expected:
            count += part.local.numel()
            if not torch.equal(part.local, expected[part.name][part.box]):
                wrong.append(part.name)
    return count, wrong


def round_trip(
    matrix: Matrix, model: str, lora: str, before: str, after: str, folder: Path
) -> list[str]:
    reference = matrix.reference(model, lora=lora)
    first, then = Layout.parse(before), Layout.parse(after)
    run_layout(save, first.world_size, first, reference, folder)
    answers = run_layout(load, then.world_size, then, reference, folder)
    assert all(count for count, _ in answers)
    return [name for _, names in answers for name in names]


TRIPS = [
    ("moe", "router", "tp2xetp2+sp", "ep2xdp2"),
    *slow(
        ("few-kv", "mixed ranks", "tp4", "tp2"),
        ("dense", "everything", "tp2+sp", "pp2xvpp2"),
        ("dense", "everything", "single", "tp2xdp2"),
        ("few-kv", "mixed ranks", "single", "tp4"),
        ("tied", "whole tied", "tp2xpp2+sp", "single"),
        ("moe", "router", "tp2xep2xetp2xdp2+sp", "ep4xdp4"),
        ("moe-mixed", "experts and MLP", "pp2xep2xdp2", "tp2xetp2+sp"),
    ),
]


@pytest.mark.parametrize(("model", "lora", "before", "after"), TRIPS)
def test_another_layout_loads_the_same_bits(
    matrix: Matrix, model: str, lora: str, before: str, after: str, tmp_path: Path
) -> None:
    assert round_trip(matrix, model, lora, before, after, tmp_path) == []
