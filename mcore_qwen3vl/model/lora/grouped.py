"""Adapters on grouped linears, which hold all experts of a rank, of either layer spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.model.decoder.grouped import Groups, grouped_product
from mcore_qwen3vl.model.lora.site import Site


class GroupedSite:
    """The arithmetic of :class:`Site` for each expert, on the rows of its tokens, in two products.

    Experts' adapters have one pair each, all of one shape and scaling, and no dropout.

    Args:
        sites: of the rank's experts, in their order.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = list(sites)

    def hook(self, module: Any, inputs: Any, outputs: Any) -> Any:
        """A forward hook of a linear that is called with tokens (T, in) and their groups.

        Transformer Engine's gets numbers of tokens instead, on the host.
        """
        tokens, groups, *_ = inputs
        output, *rest = outputs
        if not self._sites[0].on:
            return outputs
        if not isinstance(groups, Groups):
            groups = Groups.of(groups, tokens.device)
        return (self._add(tokens, output, groups), *rest)

    def _add(self, tokens: Tensor, output: Tensor, groups: Groups) -> Tensor:
        """`output` (T, out) with the adapters' part."""
        down, up, scaling = self._factors(output.dtype)
        part = grouped_product(grouped_product(tokens, down, groups) * scaling, up, groups)
        # Autograd refuses to change those that a function has made.
        return output + part if output._is_view() else output.add_(part)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        """(E, r, in), (E, out, r), and the factor of their product."""
        pairs = [pair for site in self._sites for pair in site.pairs]
        down, up = zip(*(pair() for pair in pairs), strict=True)
        a, b = self._sites[0].whole(torch.stack(down), torch.stack(up), of=pairs[0])
        return a.to(dtype), b.to(dtype), pairs[0].scaling
