"""vLLM's own loader takes every name and shape of what a rollout receives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("vllm", reason="make test-vllm makes an environment that has vLLM")

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.export import export_hf
from mcore_qwen3vl.converters.live import load_hf
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from tests.vllm.conftest import in_process, write_servable


def export(path: Path, layout: Layout, expert_layout: Any, target: Path) -> None:
    """Write what ``get_per_tensor_param`` gives, from a sharded model, into one file."""
    initialize(layout)
    chunks = build_chunks(Architecture.from_hf(path), layout)
    load_hf(chunks, path)
    tensors = {n: t.clone() for n, t in export_hf(chunks, expert_layout=expert_layout)}
    if torch.distributed.get_rank() == 0:
        save_file(tensors, target)


def in_vllm(checkpoint: Path, *files: Path) -> list[dict[str, Tensor]]:
    """Return the parameters of vLLM's model after it has loaded each of `files`."""
    results = [file.with_suffix(".got") for file in files]
    pairs = [path for pair in zip(files, results, strict=True) for path in pair]
    in_process("load.py", checkpoint, *pairs)
    return [load_file(result) for result in results]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("dense", "tp2xpp2+sp"),
        ("tied", "tp2"),
        ("moe", "tp2xep2xpp2+sp"),
        ("hybrid", "tp2xpp2+sp"),
        ("hybrid_tied", "tp2"),
        ("hybrid_moe", "tp2xep2xpp2+sp"),
    ],
)
def test_vllm_takes_it(kind: str, text: str, tmp_path: Path) -> None:
    path = write_servable(tmp_path / "hf", kind)
    layout, handed = Layout.parse(text), tmp_path / "handed.safetensors"
    run_layout(export, layout.world_size, path, layout, "published", handed)
    got, own = in_vllm(path, handed, path / "model.safetensors")
    assert got.keys() == own.keys()
    for name, tensor in got.items():
        assert not tensor.isnan().any(), f"{name} was not handed on"
        assert torch.equal(tensor, own[name]), name


def test_control_vllm_refuses_the_other_expert_layout(tmp_path: Path) -> None:
    path, handed = write_servable(tmp_path / "hf", "moe"), tmp_path / "handed"
    run_layout(export, 1, path, Layout(), "v5", handed)
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        in_vllm(path, handed)
