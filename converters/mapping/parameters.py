"""The number of parameters of a model, by kind: sums over the table, without vocabulary padding.

Inspection, FLOPs and the memory estimate all take their counts from here.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.forms import AS_CONFIG, HeadForm
from mcore_qwen3vl.converters.mapping.table import MTP, table

_KINDS = (
    ("visual.", "vision"),
    (MTP, "MTP"),
    ("layernorm.weight", "norms"),
    ("layer_norm_weight", "norms"),
    (".out_norm.", "norms"),
    ("embedding.", "embedding"),
    ("output_layer.", "output layer"),
    (".self_attention.", "attention"),
    (".experts.", "experts"),
    (".router.", "router"),
    (".mlp.linear", "mlp"),
    (".shared_experts.", "shared experts"),
)
"""Substrings of mcore keys and the kinds that they belong to; the first match counts."""


class Group(NamedTuple):
    """Parameters that are held by the same ranks under any layout.

    Attributes:
        kind: ``vision``, ``embedding``, ``output layer``, ``attention`` (gated delta nets too),
            ``mlp``, ``router``, ``experts``, ``shared experts``, ``norms``, or ``MTP``.
        layer: decoder layer; None outside the decoder's layers.
        divided: whether TP (ETP for experts) divides them; otherwise every TP rank holds them all.
    """

    kind: str
    layer: int | None
    divided: bool


@cache
def count(
    architecture: Architecture, head: HeadForm = AS_CONFIG, *, mtp: bool = False
) -> Counter[Group]:
    """Count the parameters of each group, in the order of the table. Do not change the result.

    `mtp` is as in :func:`.table.table`.
    """
    # Both expert layouts have the same number of parameters.
    layout = architecture.expert_layout or "v5"
    rows = table(architecture, expert_layout=layout, head=head.in_megatron, mtp=mtp)
    counts: Counter[Group] = Counter()
    for row in rows:
        counts[Group(kind_of_parameter(row.key), row.layer, row.tp_axis is not None)] += row.numel
    return counts


def count_by_kind(
    architecture: Architecture, head: HeadForm = AS_CONFIG, *, mtp: bool = False
) -> Counter[str]:
    """Count the parameters of each kind; a kind that the model lacks has 0."""
    counts: Counter[str] = Counter()
    for group, number in count(architecture, head, mtp=mtp).items():
        counts[group.kind] += number
    return counts


def total(architecture: Architecture, head: HeadForm = AS_CONFIG) -> int:
    """Count all parameters; a tied head and the embedding count once."""
    return count(architecture, head).total()


def active(architecture: Architecture, head: HeadForm = AS_CONFIG) -> int:
    """Count the parameters used for one token: all kinds, but only the top k experts a layer."""
    idle = count_by_kind(architecture, head)["experts"] - count_active_expert_parameters(
        architecture
    )
    return total(architecture, head) - idle


def count_active_expert_parameters(architecture: Architecture) -> int:
    """Count the parameters of the experts used for one token, summed over layers."""
    if not architecture.num_experts:
        return 0
    experts = count_by_kind(architecture)["experts"]
    return experts * architecture.num_experts_per_tok // architecture.num_experts


def kind_of_parameter(key: str) -> str:
    """Return the kind, as :class:`Group` has it, of a parameter with this mcore key or name."""
    return next(kind for pattern, kind in _KINDS if pattern in key)
