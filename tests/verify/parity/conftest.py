from mcore_qwen3vl.runtime import cpu

cpu.install()  # before any test module imports megatron

import logging  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from mcore_qwen3vl.verify.parity.matrix import Matrix  # noqa: E402

logging.getLogger("megatron").setLevel(logging.ERROR)
torch.set_num_threads(1)  # the models are too small to share out, and other ranks want the cores


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Tiny checkpoints and references, each made once a session."""
    return Matrix(tmp_path_factory.mktemp("parity"))
