"""The CPU backend, and the tiny checkpoints and data that several test folders share."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from mcore_qwen3vl.runtime import cpu

cpu.install(training=True)  # before any test module imports megatron

from mcore_qwen3vl import machine  # noqa: E402
from mcore_qwen3vl.errors import BadInput  # noqa: E402
from mcore_qwen3vl.runtime import launch  # noqa: E402
from mcore_qwen3vl.safe_path import VARIABLE  # noqa: E402
from mcore_qwen3vl.simulated_gpu import Workbench  # noqa: E402
from mcore_qwen3vl.simulated_gpu.device import cache_folder  # noqa: E402
from mcore_qwen3vl.tiny import write_tiny_checkpoint  # noqa: E402
from mcore_qwen3vl.tiny.records import write_image_qa  # noqa: E402
from mcore_qwen3vl.training.arguments import megatron_flags  # noqa: E402

if TYPE_CHECKING:  # it imports transformers, which is slow
    from mcore_qwen3vl.verification.parity.matrix import Matrix

pytest_plugins = ("tests.turns", "tests.durations")
logging.getLogger("megatron").setLevel(logging.ERROR)
launch.PATIENCE = 10.0  # a machine five times slower fails no test, and a hang still ends
# Tests count the lines of a command, and another Megatron first on PYTHONPATH would take one.
if machine.version_of("megatron-core") != version("megatron-core"):
    machine.PACKAGES = tuple(name for name in machine.PACKAGES if name != "megatron-core")
torch.set_num_threads(1)  # the models are tiny, and other ranks need the cores
# PyTorch's first call in a fork makes a new pool of threads. If two threads make it at once, they
# fail, so it is made here, before a test's fork starts a thread.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a cache of the session's own, in which only compiled libraries are shared."""
    folder, libraries = tmp_path_factory.mktemp("cache"), cache_folder()
    libraries.mkdir(parents=True, exist_ok=True)
    for shared in libraries.parents[1].iterdir():
        if shared.name != "mcore-qwen3vl":
            (folder / shared.name).symlink_to(shared)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(autouse=True)
def _own_safe_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a command in this process does to the processes of later tests."""
    monkeypatch.setenv(VARIABLE, "1")  # what is set first is undone last
    monkeypatch.delenv(VARIABLE)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("moe"), moe=True)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen3.5, whose layers are gated delta nets and attention."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hybrid"), family="qwen3.5")


@pytest.fixture(scope="session")
def hybrid_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hybrid"), family="qwen3.5", moe=True)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_qa(tmp_path_factory.mktemp("data"), 40)


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Return the layout matrix; it makes each tiny checkpoint and reference once a session."""
    from mcore_qwen3vl.verification.parity.matrix import Matrix

    return Matrix(tmp_path_factory.mktemp("parity"))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the version of Megatron whose flags are all listed: a typo is found early."""
    monkeypatch.setattr(megatron_flags, "version_of", lambda name: megatron_flags.LISTED)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle SIGINT: a suite in the background of a shell would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the limits of `run_layout` unchanged, for ranks that are meant to hang."""
    monkeypatch.setattr(launch, "PATIENCE", 1.0)


ON_WORKBENCH = (
    "mcore_qwen3vl.rehearsal.stubs",
    "mcore_qwen3vl.rehearsal.rank",
    "mcore_qwen3vl.training.run",
    "mcore_qwen3vl.training.model",
    "mcore_qwen3vl.training.data_provider",
    "mcore_qwen3vl.training.checkpoints.run_checkpoints",
    "mcore_qwen3vl.generation.generate",
    "mcore_qwen3vl.model.vision",
    "megatron.training.training",
)


@pytest.fixture(scope="session")
def workbench() -> Iterator[Workbench]:
    """Start one process on the simulated GPU for all tests, with everything imported."""
    with Workbench(ON_WORKBENCH, raised=(BadInput,)) as bench:
        yield bench
