"""What a rollout is handed, given to vLLM's own loader: it takes every name and every shape."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("vllm", reason="make test-vllm makes an environment that has vLLM")

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.live.export import export_hf
from mcore_qwen3vl.converters.live.load import load_hf
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.build import build_chunks
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import initialize
from mcore_qwen3vl.tiny import write_tiny_checkpoint

LOAD = Path(__file__).parent / "load.py"


def export(path: Path, layout: Layout, expert_layout: Any, target: Path) -> None:
    """What ``get_per_tensor_param`` gives, from a sharded model into one file."""
    initialize(layout)
    chunks = build_chunks(Architecture.from_hf(path), layout)
    load_hf(chunks, path)
    tensors = {n: t.clone() for n, t in export_hf(chunks, expert_layout=expert_layout)}
    if torch.distributed.get_rank() == 0:
        save_file(tensors, target)


def in_vllm(checkpoint: Path, tensors: Path, result: Path) -> dict[str, Tensor]:
    command = [sys.executable, str(LOAD), str(checkpoint), str(tensors), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return load_file(result)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("dense", "tp2xpp2+sp"), ("tied", "tp2"), ("moe", "tp2xep2xpp2+sp")],
)
def test_vllm_takes_it(kind: str, text: str, tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "hf", moe=kind == "moe", tie=kind == "tied")
    layout, handed = Layout.parse(text), tmp_path / "handed.safetensors"
    run_layout(export, layout.world_size, path, layout, "published", handed)
    got = in_vllm(path, handed, tmp_path / "got")
    own = in_vllm(path, path / "model.safetensors", tmp_path / "own")
    assert got.keys() == own.keys()
    for name, tensor in got.items():
        assert not tensor.isnan().any(), f"{name} was not handed on"
        assert torch.equal(tensor, own[name]), name


def test_control_vllm_refuses_the_other_expert_layout(tmp_path: Path) -> None:
    path, handed = write_tiny_checkpoint(tmp_path / "hf", moe=True), tmp_path / "handed"
    run_layout(export, 1, path, Layout(), "v5", handed)
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        in_vllm(path, handed, tmp_path / "got")
