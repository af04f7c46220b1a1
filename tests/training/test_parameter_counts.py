"""Counts of parameters are those of the model that is built."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, apply_with_peft, resolve_targets
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.converters.mapping.parameters import Group
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.lora import adapt
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.training.parameter_counts import stage_layers, trained_parameters
from mcore_qwen3vl.verification.parity.case import ADAPTERS, write_random_adapter


def test_uneven_stages() -> None:
    a = Architecture.from_hf(PUBLISHED / "235b_a22b.json")
    stages = stage_layers(a, Layout(pp=8, first=11, last=11))
    assert [len(stage) for stage in stages] == [11, *[12] * 6, 11]
    own = stage_layers(a, Layout(pp=2, split="E|t*40|t*30|t*24L"))
    assert own == [[*range(40, 70)], [*range(40), *range(70, 94)]]


def trained(hf: Path, adapter: Path) -> int:
    initialize(Layout())
    chunks = build_chunks(Architecture.from_hf(hf), Layout())
    choice = adapt(chunks, read_adapter(adapter, hf))
    for chunk in chunks:
        choice.apply(chunk)
    return sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)


def counted(config: AdapterConfig, hf: Path, *, tied: bool) -> Counter[Group]:
    return trained_parameters(
        resolve_targets(config, hf), apply_with_peft(config, hf).saved, tied=tied
    )


@pytest.mark.parametrize("lora", ["experts", "whole router"])
def test_the_count_is_the_models(lora: str, moe: Path, tmp_path: Path) -> None:
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS[lora], moe)
    counts = counted(ADAPTERS[lora], moe, tied=False)
    assert run_layout(trained, 1, moe, adapter) == [counts.total()]
    experts = sum(count for group, count in counts.items() if group.kind == "experts")
    assert (experts > 0) == (lora == "experts")


def test_a_head_that_is_tied_to_the_embedding_counts_once(tmp_path: Path) -> None:
    hf = write_tiny_checkpoint(tmp_path / "model", tie=True)
    names = {"target_modules": ("q_proj",), "modules_to_save": ("embed_tokens",)}
    config = AdapterConfig(r=2, lora_alpha=4, ensure_weight_tying=True, **names)
    adapter = write_random_adapter(tmp_path / "adapter", config, hf)
    assert run_layout(trained, 1, hf, adapter) == [counted(config, hf, tied=True).total()]


def parts(hf: Path, adapter: Path) -> dict[str, int]:
    from mcore_qwen3vl.rehearsal.rank import count_parameters_by_kind

    initialize(Layout())
    chunks = build_chunks(Architecture.from_hf(hf), Layout())
    adapt(chunks, read_adapter(adapter, hf))
    return count_parameters_by_kind(list(chunks))


@pytest.mark.parametrize("lora", ["everything", "experts", "router"])
def test_parts_are_those_of_the_mapping_and_the_adapter(
    lora: str, dense: Path, moe: Path, tmp_path: Path
) -> None:
    hf, config = dense if lora == "everything" else moe, ADAPTERS[lora]
    adapter = write_random_adapter(tmp_path / "adapter", config, hf)
    wanted = {
        part: n for part, n in parameters.count_by_kind(Architecture.from_hf(hf)).items() if n
    }
    targets, saved = resolve_targets(config, hf), apply_with_peft(config, hf).saved
    factors = trained_parameters(targets, saved, tied=False).total()
    assert run_layout(parts, 1, hf, adapter) == [wanted | {"adapter": factors}]
