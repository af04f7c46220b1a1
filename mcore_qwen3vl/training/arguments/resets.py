"""``--FLAG none``: unset a flag that a script set, where Megatron has no value for "unset"."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "none"
RESETTABLE = frozenset(
    {
        *("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
        *("--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"),
        "--num-layers-per-virtual-pipeline-stage",
        *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
        *(f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss")),
        "--sequence-parallel",
    }
)
"""Flags that may be followed by ``none``."""


def without_flags(argv: Sequence[str], names: frozenset[str]) -> list[str]:
    """Return `argv` without the flags `names` and their values."""
    kept, dropping = [], False
    for word in argv:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in names
        if not dropping:
            kept.append(word)
    return kept


def take_back(argv: Sequence[str]) -> list[str]:
    """Remove each ``--FLAG none`` and the earlier uses of that flag from `argv`.

    A later ``--FLAG VALUE`` sets the flag again.
    """
    kept: list[str] = []
    for word in argv:
        if word == NONE and kept and kept[-1] in RESETTABLE:
            kept = without_flags(kept, frozenset({kept[-1]}))
        elif word.endswith(f"={NONE}") and word.partition("=")[0] in RESETTABLE:
            kept = without_flags(kept, frozenset({word.partition("=")[0]}))
        else:
            kept.append(word)
    return kept
