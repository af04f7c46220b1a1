"""Data and checkpoints of the tasks' tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.tiny import write_tiny_checkpoint
from tests.converters.forms import saved_as
from tests.losses.retrieval import write_retrieval, write_scored
from tests.losses.whole_batch import class_of


@pytest.fixture(scope="session")
def retrieval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_retrieval(tmp_path_factory.mktemp("retrieval"), 9)


@pytest.fixture(scope="session")
def scored_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scored(tmp_path_factory.mktemp("scored_pairs"), 16)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.fixture(scope="module")
def headed(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[..., Path]:
    """Return what makes a classifier of the checkpoint `kind`, with changes of its config."""
    folder = tmp_path_factory.mktemp("headed")

    def make(kind: str, **config: Any) -> Path:
        source = request.getfixturevalue(kind)
        target = folder / "-".join([kind, *map(str, config.values())])
        if not target.exists():
            shutil.copytree(source, target)
            (target / "model.safetensors").unlink()
            saved_as(class_of(source), **config)(source, target)
        return target

    return make


@pytest.fixture
def checkpoint(kind: str, request: pytest.FixtureRequest) -> Path:
    """Return the checkpoint of the fixture that a test's parameter `kind` names."""
    path: Path = request.getfixturevalue(kind)
    return path
