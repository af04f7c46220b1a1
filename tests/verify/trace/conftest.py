from mcore_qwen3vl.runtime import cpu

cpu.install()  # before any test module imports megatron

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

from mcore_qwen3vl.verify.trace.fault_injection import FaultInjector  # noqa: E402


@pytest.fixture(scope="session")
def injector(tmp_path_factory: pytest.TempPathFactory) -> FaultInjector:
    return FaultInjector(Path(tmp_path_factory.mktemp("injector")))
