"""The CPU backend, and tiny checkpoints and data that several folders of tests share."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl.runtime import cpu

cpu.install(training=True)  # before any test module imports megatron

from mcore_qwen3vl.tiny import write_tiny_checkpoint  # noqa: E402
from mcore_qwen3vl.tiny.records import write_image_qa  # noqa: E402

logging.getLogger("megatron").setLevel(logging.ERROR)
torch.set_num_threads(1)  # the models are too small to share out, and other ranks want the cores


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("moe"), moe=True)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_qa(tmp_path_factory.mktemp("data"), 40)
