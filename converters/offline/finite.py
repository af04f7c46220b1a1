"""The note on weights that are NaN or infinite, which are converted unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SHOWN = 5
"""The most tensors that a note names."""


def notes(results: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Return one sentence that names the tensors with NaN or infinite values, or an empty tuple.

    Args:
        results: results of units of work, which list the names of such tensors under
            ``nonfinite``.
    """
    names = sorted({name for result in results for name in result.get("nonfinite", ())})
    if not names:
        return ()
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    count = "1 tensor has" if len(names) == 1 else f"{len(names)} tensors have"
    return (f"{count} NaN or infinite values: {shown}.",)
