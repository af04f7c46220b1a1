"""The checkpoints that the converter is tested on, and ways to inspect one without its code."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_qwen3vl.tiny import YARN

CASES: dict[str, dict[str, Any]] = {
    "dense-tied": {"tie": True, "seed": 1},
    "dense": {"seed": 2},
    "dense-v5": {"layout": "v5", "seed": 3},
    "moe": {"moe": True, "seed": 4},
    "moe-v5": {"moe": True, "layout": "v5", "seed": 5},
    # hidden_size == 2 * moe_intermediate_size and hidden_size == moe_intermediate_size: the shape
    # of gate_up_proj, then of down_proj, cannot tell the layouts apart.
    "moe-H=2I": {"moe": True, "text": {"moe_intermediate_size": 24}, "seed": 6},
    "moe-H=2I-v5": {
        "moe": True,
        "layout": "v5",
        "text": {"moe_intermediate_size": 24},
        "seed": 7,
    },
    "moe-H=I": {"moe": True, "text": {"moe_intermediate_size": 48}, "seed": 8},
    "moe-H=I-v5": {
        "moe": True,
        "layout": "v5",
        "text": {"moe_intermediate_size": 48},
        "seed": 9,
    },
    "mixed-listed": {"moe": True, "text": {"mlp_only_layers": [0, 2]}, "seed": 10},
    "mixed-step-v5": {
        "moe": True,
        "layout": "v5",
        "text": {"decoder_sparse_step": 2},
        "seed": 11,
    },
    "yarn": {"text": YARN, "seed": 13},
    "yarn-v5": {"layout": "v5", "text": YARN, "seed": 14},
    "bf16-sharded": {"moe": True, "dtype": "bfloat16", "max_shard_size": "300KB", "seed": 12},
}
HYBRID_CASES: dict[str, dict[str, Any]] = {
    "hybrid": {"family": "qwen3.5", "dtype": "bfloat16", "seed": 15},
    "hybrid-tied": {"family": "qwen3.5", "tie": True, "seed": 16},
    "hybrid-moe": {"family": "qwen3.5", "moe": True, "dtype": "bfloat16", "seed": 17},
    "hybrid-float32": {"family": "qwen3.5", "seed": 20},
    "hybrid-moe-float32": {"family": "qwen3.5", "moe": True, "seed": 19},
    "hybrid-moe-tied": {"family": "qwen3.5", "moe": True, "tie": True, "seed": 21},
    "hybrid-moe-v5": {"family": "qwen3.5", "moe": True, "layout": "v5", "seed": 18},
}
"""Checkpoints of Qwen3.5, which the legacy format does not hold."""


class Call:
    """An object pickled as a call: whoever loads the pickle runs the call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def load(path: Path) -> dict[str, Tensor]:
    """Load every tensor of an HF checkpoint."""
    files = sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def turned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Swap the last two axes of fused experts: from published to v5, or back."""
    return {
        name: t.transpose(1, 2) if t.ndim == 3 and "experts" in name else t
        for name, t in tensors.items()
    }


def one_by_one(tensors: dict[str, Tensor], start: str = "") -> dict[str, Tensor]:
    """Write fused experts, (E, out, in), whose names begin so, as a tensor for each matrix."""
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, kind = name.rpartition(".")
        if not experts.endswith(".mlp.experts") or not name.startswith(start):
            written[name] = tensor
            continue
        parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
        for expert, matrix in enumerate(tensor):
            for part, values in zip(parts, matrix.chunk(len(parts)), strict=True):
                written[f"{experts}.{expert}.{part}.weight"] = values.clone()
    return written


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Replace the weights of a single-file HF checkpoint."""
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def assert_same_tensors(a: Path, b: Path) -> None:
    left, right = load(a), load(b)
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


def assert_same_files(a: Path, b: Path) -> None:
    """Check that all files but weights have the same content."""

    def files(path: Path) -> dict[str, bytes]:
        found = (f for f in path.rglob("*") if f.is_file() and "safetensors" not in f.name)
        return {str(f.relative_to(path)): f.read_bytes() for f in found}

    assert files(a) == files(b)


def tree_digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below `path`."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def edit_config(path: Path, **changes: Any) -> None:
    """Change fields of ``config.json``, given as ``section__field=value``; None removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        target = config[section] if section else config
        if value is None:
            del target[field]
        else:
            target[field] = value
    file.write_text(json.dumps(config))


def cut(path: Path, keep: int) -> None:
    """Keep only the first `keep` bytes."""
    data = path.read_bytes()
    path.write_bytes(data[:keep])
