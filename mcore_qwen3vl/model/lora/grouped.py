"""Adapters on Transformer Engine's grouped linears, which hold all experts of a rank.

The arithmetic is that of :class:`Site`; what is assumed of mcore's ``TEGroupedLinear`` is its call,
``(tokens, tokens per expert)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mcore_qwen3vl.model.lora.site import Site


class GroupedSite:
    """One :class:`Site` an expert, on the rows of the expert's tokens.

    Args:
        sites: of the rank's experts, in their order.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = list(sites)

    def hook(self, module: Any, inputs: Any, outputs: Any) -> Any:
        """A forward hook of the grouped linear; its second input are host numbers in mcore."""
        tokens, counts, *_ = inputs
        output, *rest = outputs
        parts = zip(
            self._sites, tokens.split(list(counts)), output.split(list(counts)), strict=True
        )
        return (torch.cat([site.add(x, part) for site, x, part in parts]), *rest)
