import pytest

from mcore_qwen3vl.verify.trace.fault_injection import FaultInjector


@pytest.fixture(scope="session")
def injector(tmp_path_factory: pytest.TempPathFactory) -> FaultInjector:
    return FaultInjector(tmp_path_factory.mktemp("faults"))
