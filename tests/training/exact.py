"""Curves that must be equal bit for bit."""

from __future__ import annotations

from typing import Any


def numbers_of(log: list[dict[str, Any]]) -> list[float]:
    """Return losses and gradient norms in turn."""
    return [entry[name] for entry in log for name in ("lm loss", "grad norm")]
