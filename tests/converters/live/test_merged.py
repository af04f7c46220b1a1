"""Factors start the same under every layout; merged weights are the offline merge's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, resolve_targets
from mcore_qwen3vl.converters.adapters.merge import merge
from mcore_qwen3vl.converters.export import export_merged, save_adapter, save_hf
from mcore_qwen3vl.converters.live import initialize_factors, load_hf
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.lora import adapt, attach
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verify.parity.case import ADAPTERS, write_random_adapter
from tests.converters.adapters.rounding import assert_merged
from tests.converters.checkpoints import load, turned
from tests.turns import slow

BUCKET = 20_000
"""Bytes of a bucket: some buckets hold several tensors, and some tensors are larger than one."""


def merged_of(layout: Layout, dtype: torch.dtype, hf: Path, adapter: Path, out: Path) -> dict:
    """Return this rank's merged weights; write the base and the adapter to `out`."""
    initialize(layout)
    chunks = build_chunks(Architecture.from_hf(hf), layout, params_dtype=dtype)
    load_hf(chunks, hf)
    save_hf(chunks, out / "base", hf_config=hf)
    read = read_adapter(adapter, hf)
    adapt(chunks, read)
    save_adapter(chunks, out / "adapter", config=read.config, hf_config=hf)
    before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    merged = {
        name: tensor.clone()
        for name, tensor in export_merged(
            chunks,
            resolve_targets(read.config, hf),
            expert_layout="published",
            bucket_bytes=BUCKET,
        )
    }
    after = [p for chunk in chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return merged


@pytest.mark.parametrize(
    ("name", "moe", "layout", "dtype"),
    [
        ("router", True, "ep2xdp2", torch.bfloat16),
        *slow(
            ("everything", False, "tp2", torch.float32),
            ("router", True, "tp2xep2xetp2xdp2+sp", torch.bfloat16),
            ("everything", False, "tp2xpp2", torch.float32),
        ),
    ],
)
def test_equals_the_offline_merge(
    name: str, moe: bool, layout: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    hf = write_tiny_checkpoint(tmp_path / "hf", moe=moe, seed=3)
    adapter = write_random_adapter(tmp_path / "random", ADAPTERS[name], hf)
    parsed = Layout.parse(layout)
    found: dict[str, Tensor]
    found, *others = run_layout(merged_of, parsed.world_size, parsed, dtype, hf, adapter, tmp_path)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    wanted, base = load(tmp_path / "merged"), turned(load(tmp_path / "base"))
    read = read_adapter(tmp_path / "adapter", tmp_path / "base")
    assert found.keys() == wanted.keys()
    for tensors in (wanted, found, *others):
        assert_merged(turned(tensors), base, read)


def tied_head(hf: Path) -> None:
    initialize(Layout())
    config = AdapterConfig(r=2, lora_alpha=2, target_modules=("lm_head",))
    chunks = build_chunks(Architecture.from_hf(hf), Layout())
    next(export_merged(chunks, resolve_targets(config, hf)))


def test_the_head_of_tied_embeddings_is_refused(tmp_path: Path) -> None:
    hf = write_tiny_checkpoint(tmp_path / "hf", tie=True)
    with pytest.raises(BadInput, match="one merged weight cannot serve as both"):
        run_layout(tied_head, 1, hf)


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
