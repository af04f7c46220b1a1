"""Losses by name: ours, those of entry points, and any ``module:function``.

A loss turns this rank's per-token cross entropies into a sum and a count. Megatron adds both up
over micro-batches, DP and CP, and divides once: the mean over all trained tokens of the global
batch, as HF's ``num_items_in_batch``, never a mean of means.

To add one, write ``def my_loss(losses, weights)`` and pass ``--loss my_package.losses:my_loss``, or
register it as an entry point of the group ``mcore_qwen3vl.losses`` and pass its name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from torch import Tensor

from mcore_qwen3vl.errors import BadInput

GROUP = "mcore_qwen3vl.losses"

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(losses, weights) -> (sum, count)``.

Args:
    losses: (B, s) float32 cross entropy of each local position.
    weights: (B, s) float32 weight of its label; 0: not trained.

Returns:
    The sum to minimise, a float32 scalar, and the number of tokens it is of, an integer scalar;
    Megatron counts in int32.
"""


def cross_entropy(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Every trained token counts the same."""
    return _masked_sum(losses, (weights > 0).to(losses.dtype)), _count(weights)


def weighted_cross_entropy(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Every trained token counts with its message's and sample's weight.

    The sum is divided by the number of trained tokens, so weights that are all 2 double the
    gradient.
    """
    return _masked_sum(losses, weights), _count(weights)


BUILT_IN: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "weighted_cross_entropy": weighted_cross_entropy,
}


def find_loss(name: str) -> Loss:
    """The loss called `name`.

    Raises:
        BadInput: there is none; the message lists those that exist.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return _import(name)
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise BadInput(
            f"--loss {name} is not known. There are {', '.join([*BUILT_IN, *found])}; or name a "
            "function as module:function."
        )
    return cast(Loss, found[name].load())


def _import(path: str) -> Loss:
    module, _, function = path.partition(":")
    try:
        return cast(Loss, getattr(importlib.import_module(module), function))
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"--loss {path} cannot be imported: {error}. The module must be on PYTHONPATH."
        ) from None


def _masked_sum(losses: Tensor, weights: Tensor) -> Tensor:
    # Padding is cut out before the product: its loss may be infinite, and 0 * inf is NaN.
    return (losses.where(weights > 0, 0.0) * weights).sum()


def _count(weights: Tensor) -> Tensor:
    return (weights > 0).sum().int()
