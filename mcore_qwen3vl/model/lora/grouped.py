"""Adapters on grouped linears, which hold all experts of a rank, for both layer specs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.model.decoder.grouped import Groups, grouped_product
from mcore_qwen3vl.model.lora.site import Site


class GroupedSite:
    """Computes :class:`Site` for all experts of a rank, each on its own tokens, in two products.

    Each expert's adapter has one pair, all have the same shape and scaling, and no dropout.

    Args:
        sites: the sites of the rank's experts, in their order.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = list(sites)

    def hook(self, module: Any, inputs: Any, outputs: Any) -> Any:
        """Add the adapters' part: a forward hook of a linear called with tokens (T, in) and groups.

        Transformer Engine's linear is called with numbers of tokens on the host instead of groups.
        """
        tokens, groups, *_ = inputs
        output, *rest = outputs
        if not self._sites[0].on:
            return outputs
        if not isinstance(groups, Groups):
            groups = Groups.of(groups, tokens.device)
        return (self._add(tokens, output, groups), *rest)

    def _add(self, tokens: Tensor, output: Tensor, groups: Groups) -> Tensor:
        """Add the adapters' part to `output` (T, out)."""
        down, up, scaling = self._factors(output.dtype)
        part = grouped_product(grouped_product(tokens, down, groups) * scaling, up, groups)
        # Autograd forbids in-place changes of a Function's views.
        return output + part if output._is_view() else output.add_(part)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        """Return A (E, r, in), B (E, out, r), and the scaling of their product."""
        pairs = [pair for site in self._sites for pair in site.pairs]
        down, up = zip(*(pair() for pair in pairs), strict=True)
        a, b = self._sites[0].whole(torch.stack(down), torch.stack(up), of=pairs[0])
        return a.to(dtype), b.to(dtype), pairs[0].scaling
