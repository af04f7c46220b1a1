"""Modules that are imported when something in them is first used.

A module for the command line may compute as well. It names heavy modules in this way::

    if TYPE_CHECKING:
        import torch
    else:
        torch = Lazy("torch")

Python 3.15 has ``lazy import torch`` for it (PEP 810).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazy:
    """A module's stand-in; reading an attribute imports the module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
