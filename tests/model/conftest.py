from collections.abc import Callable
from pathlib import Path

import pytest

from tests.model.reference import Reference, load


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """A tiny HF model, written, loaded and kept once for each set of options."""
    known: dict[str, Reference] = {}

    def get(**options: object) -> Reference:
        key = repr(sorted(options.items()))
        if key not in known:
            path: Path = tmp_path_factory.mktemp("tiny")
            known[key] = load(path, **options)
        return known[key]

    return get
