"""Adapters on routers, which compute their logits in a method and not in a module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.model.lora.site import Site

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def adapt_router(router: Any, site: Site) -> None:
    """Add the part of `site` to the router's logits, in the dtype in which routing is computed.

    Args:
        router: an mcore ``TopKRouter``.
        site: a site with one pair, whose factors are (r, H) and (E, r).
    """
    router.gating = lambda hidden: site.add(hidden, _logits(router, hidden))


def spare_weight_gradient(router: Any) -> None:
    """Skip the weight gradient of a frozen router that has no adapter; see :func:`_logits`."""
    router.gating = partial(_logits, router)


def _logits(router: Any, hidden: Tensor) -> Tensor:
    """Compute the router's logits, without the gradient of a frozen weight.

    ``Router.gating`` computes that gradient even for a frozen weight. With Transformer Engine we
    keep ``Router.gating``: its product takes half precision and returns float32, for which torch's
    product would need a float32 copy of the input.
    """
    if router.weight.requires_grad or router.config.transformer_impl != "local":
        return type(router).gating(router, hidden)
    dtype = _DTYPES.get(router.config.moe_router_dtype, hidden.dtype)
    return F.linear(hidden.to(dtype), router.weight.to(dtype))
