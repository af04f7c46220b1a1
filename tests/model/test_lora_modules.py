"""A pair of factors: its input under a fused norm, its rows in a fused linear, its memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_qwen3vl.model import lora
from mcore_qwen3vl.model.lora_modules import FactorShard, LinearKind, Pair, Site


def site(rows: list[int], *shapes: tuple[int, int]) -> Site:
    """Return a site of 7 inputs and of B factors of these shapes (out, r), which lie at `rows`."""
    pairs = [
        Pair(
            str(i),
            FactorShard((r, 7), None),
            FactorShard((out, r), None),
            scaling=3.0,
            like=torch.ones(1),
        )
        for i, (out, r) in enumerate(shapes)
    ]
    for parameter in (p for pair in pairs for p in pair.parameters()):
        nn.init.normal_(parameter)
    return Site(pairs, torch.tensor(rows), LinearKind(None, None), None)


class FusedNorm(nn.Module):
    """A stand-in for Transformer Engine's fused norm and linear, called as mcore wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.return_layernorm_output = False
        self.weight = nn.Parameter(torch.randn(5, 7))

    def forward(self, x: Tensor) -> Any:
        normed = F.rms_norm(x, (7,))
        out = F.linear(normed, self.weight)
        return ((out, normed) if self.return_layernorm_output else out), None


def test_a_fused_norm_gives_adapters_what_it_gives_its_weight() -> None:
    linear, beside = FusedNorm(), site([*range(5)], (5, 2))
    lora._install_sites(linear, LinearKind(None, None), [beside])
    x = torch.randn(9, 1, 7)
    output, bias = linear(x)
    a, b = beside.pairs[0]()
    expected = F.rms_norm(x, (7,)) @ (linear.weight + 3.0 * b @ a).T
    assert bias is None
    torch.testing.assert_close(output, expected)


def test_rows_lie_where_the_fused_linear_has_them() -> None:
    """It has q q k v | q q k v, where k has no adapter, and one row of padding."""
    fused = site([0, 1, -1, 4, 2, 3, -1, 5, -1], (4, 2), (2, 3))
    q, v = torch.arange(1.0, 9.0).view(4, 2), torch.arange(10.0, 16.0).view(2, 3)
    expected = torch.zeros(9, 5)
    expected[[0, 1, 4, 5], :2] = q
    expected[[3, 7], 2:] = v
    assert torch.equal(fused.matrix([q, v]), expected)


def test_one_factor_that_is_everything_is_not_copied() -> None:
    b = torch.ones(4, 2)
    assert site([0, 1, 2, 3], (4, 2)).matrix([b]) is b
    assert site([0, 1, 2, 3, -1], (4, 2)).matrix([b]).shape == (5, 2)
