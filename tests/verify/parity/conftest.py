import pytest

from mcore_qwen3vl.verify.parity.matrix import Matrix


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Return the layout matrix; it makes each tiny checkpoint and reference once a session."""
    return Matrix(tmp_path_factory.mktemp("parity"))
