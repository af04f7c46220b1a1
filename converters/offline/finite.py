"""Weights that are NaN or infinite are converted as they are, and named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SHOWN = 5
"""How many tensors a note names."""


def notes(results: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """
    Args:
        results: of units of work, with the names of their tensors under ``nonfinite``.

    Returns:
        One sentence with the names, or nothing.
    """
    names = sorted({name for result in results for name in result.get("nonfinite", ())})
    if not names:
        return ()
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    count = "1 tensor has" if len(names) == 1 else f"{len(names)} tensors have"
    return (f"{count} NaN or infinite values: {shown}.",)
