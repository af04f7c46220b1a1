"""A tiny checkpoint that tests of commands read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "hf", moe=True)
