from pathlib import Path

import pytest


@pytest.fixture
def checkpoint(kind: str, request: pytest.FixtureRequest) -> Path:
    """Return the checkpoint of the fixture that a test's parameter `kind` names."""
    path: Path = request.getfixturevalue(kind)
    return path
