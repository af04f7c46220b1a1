from mcore_qwen3vl.runtime import cpu

cpu.install()  # before any test module imports megatron

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

from mcore_qwen3vl.verify.trace.planted import Garden  # noqa: E402


@pytest.fixture(scope="session")
def garden(tmp_path_factory: pytest.TempPathFactory) -> Garden:
    return Garden(Path(tmp_path_factory.mktemp("garden")))
