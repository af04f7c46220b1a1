"""The CPU backend, tiny checkpoints and a small data set, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.runtime import cpu

cpu.install(training=True)  # before any test module imports megatron

from mcore_qwen3vl.tiny import write_tiny_checkpoint  # noqa: E402
from mcore_qwen3vl.tiny.records import write_image_qa  # noqa: E402


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("moe"), moe=True)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_qa(tmp_path_factory.mktemp("data"), 40)
