"""Data and checkpoints of the tasks' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.tiny import write_tiny_checkpoint
from tests.training.tasks.retrieval import write_retrieval


@pytest.fixture(scope="session")
def retrieval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_retrieval(tmp_path_factory.mktemp("retrieval"), 16)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tied"), tie=True)
