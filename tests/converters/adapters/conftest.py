"""Adapters of every kind, each made once a session by PEFT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.converters.adapters.peft_made import KINDS, make


@dataclass(frozen=True)
class Made:
    """A checkpoint, an adapter for it, and PEFT's model with both."""

    base: Path
    folder: Path
    model: Any


@pytest.fixture(scope="session")
def made(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Made]:
    """Return a function that gives the read-only adapter of a kind in `KINDS`."""
    known: dict[str, Made] = {}

    def get(kind: str) -> Made:
        if kind not in known:
            base, folder = tiny(KINDS[kind].case), tmp_path_factory.mktemp("adapter")
            known[kind] = Made(base, folder, make(KINDS[kind], base, folder))
        return known[kind]

    return get
