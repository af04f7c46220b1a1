"""The kernels of heads equal plain torch and HF's rotation, as Triton interprets them.

The interpreter shows neither races nor speed. It truncates to bf16, where a GPU rounds to nearest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

from mcore_qwen3vl.kernels.heads import HeadColumns, HeadNorms, split_heads
from tests.docs.markdown import ROOT

TOKENS = 5
INTERPRETED = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
KINDS = ("even heads", "two blocks of heads", "gates and values that stay")
CASES = [(dtype, kind) for dtype in ("float32", "bfloat16") for kind in KINDS]


def columns_of(kind: str) -> tuple[HeadColumns, int]:
    """Return what heads a kind of projection has, and half of their values that turn."""
    if kind == "even heads":
        return HeadColumns(4, 2, 8, gated=False), 4
    if kind == "two blocks of heads":
        return HeadColumns(40, 2, 128, gated=False), 64
    return HeadColumns(6, 2, 20, gated=True), 3


def plain(
    projection: Tensor, kind: str, cos: Tensor, sin: Tensor, norms: HeadNorms
) -> list[Tensor]:
    """Do what the kernels do, by torch's norm and Hugging Face's rotation."""
    columns, half = columns_of(kind)
    heads, groups, width = columns.heads, columns.groups, columns.width
    sizes = [heads // groups] * (2 if columns.gated else 1)
    parts = projection.unflatten(-1, (groups, -1, width)).split([*sizes, 1, 1], dim=2)
    query, *gates, key, value = (part.flatten(1, 2) for part in parts)
    add = float(norms.zero_centered)
    query = F.rms_norm(query, (width,), norms.query + add, norms.eps)
    key = F.rms_norm(key, (width,), norms.key + add, norms.eps)
    tables = (torch.cat((table, table), -1) for table in (cos, sin))
    turned = apply_rotary_pos_emb(
        *(x[..., : 2 * half] for x in (query, key)), *tables, unsqueeze_dim=1
    )
    both = [
        torch.cat((y, x[..., 2 * half :]), -1) for y, x in zip(turned, (query, key), strict=True)
    ]
    return [*both, value, *gates]


def measure(dtype: str, kind: str) -> dict[str, float]:
    """Return the largest errors of values and gradients, relative to the largest of each tensor."""
    from mcore_qwen3vl.kernels import heads_triton

    torch.manual_seed(7)
    columns, half = columns_of(kind)
    kinds = {"dtype": getattr(torch, dtype)}
    size = columns.heads * (2 if columns.gated else 1) + 2 * columns.groups
    # Rows are further apart than they are long, as in a part of a larger tensor.
    projection = torch.randn(TOKENS, size * columns.width + 3, **kinds)[:, :-3]
    angles = 6 * torch.rand(TOKENS, 2 * half)[:, :half]
    cos, sin = angles.cos().to(**kinds), angles.sin().to(**kinds)
    weights = (torch.rand(columns.width, **kinds) for _ in range(2))
    norms = HeadNorms(*weights, eps=1e-3, zero_centered=columns.gated)
    leaves = [projection, norms.query, norms.key]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wide = HeadNorms(*exact[1:], norms.eps, norms.zero_centered)
    outputs = plain(exact[0], kind, cos.double(), sin.double(), wide)
    gradients = [torch.randn(output.shape, **kinds) for output in outputs]
    torch.autograd.backward(outputs, [gradient.double() for gradient in gradients])
    for leaf in leaves:
        leaf.requires_grad_()
    with mock.patch.object(heads_triton, "PROGRAMS", 2):  # each with several tokens
        found = split_heads(projection, columns, cos, sin, norms)
        torch.autograd.backward(found, gradients)
    assert all(output.is_contiguous() and output.dtype == projection.dtype for output in found)
    pairs = [*zip(found, outputs, strict=True)]
    of_leaves = [(leaf.grad, right.grad) for leaf, right in zip(leaves, exact, strict=True)]
    return {"values": max(map(_error, pairs)), "gradients": max(map(_error, of_leaves))}


def _error(pair: Any) -> float:
    found, right = pair
    return float(((found.double() - right).abs().max() / right.abs().max()).detach())


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    """Run this file in a process of its own: Triton looks at the variable when it is imported."""
    words = [sys.executable, str(Path(__file__))]
    done = subprocess.run(words, env=INTERPRETED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_values_and_gradients(case: tuple[str, str], measured: dict[str, dict[str, float]]) -> None:
    found = measured[" ".join(case)]
    assert found["values"] < (1e-6 if case[0] == "float32" else 2**-7)
    assert found["gradients"] < (1e-6 if case[0] == "float32" else 2**-7)


@pytest.mark.slow
def test_a_model_with_these_kernels_equals_hugging_face_and_keeps_no_outputs() -> None:
    """Decoder and tower, under SP, and under CP with padding; and with outputs recomputed.

    Triton's interpreter takes minutes for each.
    """
    files = [
        str(ROOT / "tests" / "model" / f"test_{name}.py") for name in ("against_hf", "recompute")
    ]
    words = [sys.executable, "-m", "pytest", "-q", *files, "-m", "not slow"]
    words += ["-k", "(equals_hugging_face and (SP or CP)) or (same_bits and single)"]
    done = subprocess.run(words, env=INTERPRETED, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


if __name__ == "__main__":
    print(json.dumps({" ".join(case): measure(*case) for case in CASES}))
