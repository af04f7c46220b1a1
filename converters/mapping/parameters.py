"""How many parameters a model has, by part: sums over the table, without vocabulary padding.

Inspection, FLOPs and the estimate of memory all count here.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.row import Row
from mcore_qwen3vl.converters.mapping.table import table

_PARTS = (
    ("visual.", "vision"),
    ("layernorm.weight", "norms"),
    ("layer_norm_weight", "norms"),
    ("embedding.", "embedding"),
    ("output_layer.", "output layer"),
    (".self_attention.", "attention"),
    (".experts.", "experts"),
    (".router.", "router"),
    (".mlp.linear", "mlp"),
)
"""What an mcore key has in it, and the part that it belongs to; the first that is found counts."""


class Group(NamedTuple):
    """Parameters that are alike in all that decides which ranks hold them.

    Attributes:
        part: ``vision``, ``embedding``, ``output layer``, ``attention``, ``mlp``, ``router``,
            ``experts`` or ``norms``.
        layer: of the decoder; None outside of it.
        divided: over TP, or ETP if they are experts'; if not, every rank of TP has them all.
    """

    part: str
    layer: int | None
    divided: bool


@cache
def count(architecture: Architecture) -> Counter[Group]:
    """The number of parameters in each group, in the order of the table; not to be changed."""
    # Both layouts of the experts have as many.
    rows = table(architecture, expert_layout=architecture.expert_layout or "v5")
    counts: Counter[Group] = Counter()
    for row in rows:
        counts[Group(_part(row), row.layer, row.tp_axis is not None)] += row.numel
    return counts


def by_part(architecture: Architecture) -> Counter[str]:
    """The number of parameters in each part; 0 in those that the model does not have."""
    counts: Counter[str] = Counter()
    for group, number in count(architecture).items():
        counts[group.part] += number
    return counts


def total(architecture: Architecture) -> int:
    """All parameters, a tied head counted once."""
    return count(architecture).total()


def active(architecture: Architecture) -> int:
    """Parameters used for one token: all parts, with the top k of each layer's experts."""
    return total(architecture) - by_part(architecture)["experts"] + active_experts(architecture)


def active_experts(architecture: Architecture) -> int:
    """Parameters of the experts used for one token, in all layers together."""
    if not architecture.num_experts:
        return 0
    experts = by_part(architecture)["experts"]
    return experts * architecture.num_experts_per_tok // architecture.num_experts


def _part(row: Row) -> str:
    return next(part for pattern, part in _PARTS if pattern in row.key)
