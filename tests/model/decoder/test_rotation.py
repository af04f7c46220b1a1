"""The rotary embedding equals plain torch, and the fused kernel is called as it requires."""

from __future__ import annotations

import pytest
import torch
from megatron.core.extensions import transformer_engine
from torch import Tensor

from mcore_qwen3vl.model.decoder.attention import rotate, rotate_fused

LENGTH, BATCH, HEADS, WIDTH = 7, 2, 3, 10
PART = 6
"""The values of each head that turn, in the models in which not all do."""


def given(batch: int, rotated: int = WIDTH) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(LENGTH, BATCH, HEADS, WIDTH, generator=random, dtype=torch.float64)
    half = 3 * torch.randn(LENGTH, batch, 1, rotated // 2, generator=random, dtype=torch.float64)
    return x, torch.cat([half, half], -1)


def plain(x: Tensor, angles: Tensor) -> Tensor:
    x, rest = x.split((angles.shape[-1], WIDTH - angles.shape[-1]), -1)
    first, second = x.chunk(2, -1)
    turned = x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([turned, rest], -1)


def unfused_kernel(x: Tensor, angles: Tensor) -> Tensor:
    """Stand in for Transformer Engine's kernel, which takes one row of angles for the batch."""
    assert angles.shape[:3] == (len(x), 1, 1)
    return plain(x, angles)


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rotated", [WIDTH, PART])
def test_equals_plain_torch(
    monkeypatch: pytest.MonkeyPatch, batch: int, fused: bool, rotated: int
) -> None:
    name = "fused_apply_rotary_pos_emb"
    monkeypatch.setattr(transformer_engine, name, unfused_kernel, raising=False)
    x, angles = given(batch, rotated)
    results = []
    for by_plain in (True, False):
        own = x.clone().requires_grad_()
        if by_plain:
            turned = plain(own, angles)
        elif fused:
            turned = rotate_fused(own, angles)
        else:
            half = angles[..., : rotated // 2]
            turned = rotate(own, half.cos(), half.sin())
        assert turned.shape == x.shape
        (gradient,) = torch.autograd.grad((turned * x.exp()).sum(), own)
        results.append((turned.detach(), gradient))
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=1e-13)


def test_exact_tables_round_once() -> None:
    x, angles = given(1)
    half = angles[..., : WIDTH // 2].float()
    found = rotate(x.bfloat16(), half.cos(), half.sin())
    right = plain(x.bfloat16().double(), torch.cat([half, half], -1).double())
    assert found.dtype == torch.bfloat16
    assert ((found.double() - right).abs() <= 1.001 * 2**-8 * right.abs()).all()
