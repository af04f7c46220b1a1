import pytest

from tests.converters.conftest import _no_fsync, tiny  # noqa: F401
from tests.verification.faults import FaultInjector


@pytest.fixture(scope="session")
def injector(tmp_path_factory: pytest.TempPathFactory) -> FaultInjector:
    return FaultInjector(tmp_path_factory.mktemp("faults"))
