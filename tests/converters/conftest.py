"""Tiny checkpoints, written once a session and never changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from tests.converters.checkpoints import CASES, HYBRID_CASES


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fsync: no test cuts the power, and on a busy disk it takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the read-only checkpoint directory of one of these cases."""
    written: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in written:
            path = tmp_path_factory.mktemp("tiny") / case
            written[case] = write_tiny_checkpoint(path, **(CASES | HYBRID_CASES)[case])
        return written[case]

    return get


@pytest.fixture(scope="session")
def form(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """``form(name)`` is a checkpoint in a form of `FORMS`; read-only."""
    from tests.converters.forms import FORMS  # imports transformers' models, which takes seconds

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("forms") / "hf"
            FORMS[name].make(tiny(FORMS[name].source), made[name])
        return made[name]

    return get


@pytest.fixture(scope="session")
def converted(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """``converted(case, dialect=...)`` is an mcore checkpoint of a case; read-only."""
    made: dict[tuple[str, str | None], Path] = {}

    def get(case: str, dialect: str | None = None) -> Path:
        if (case, dialect) not in made:
            made[case, dialect] = tmp_path_factory.mktemp("converted") / case
            hf_to_mcore(tiny(case), made[case, dialect], dialect=dialect)
        return made[case, dialect]

    return get


@pytest.fixture(scope="session")
def mcore_dense(converted: Callable[..., Path]) -> Path:
    return converted("dense")
