from collections.abc import Callable
from pathlib import Path

import pytest

from tests.model.reference import Reference, load


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """Return a function that gives a tiny HF model, written and loaded once a set of options."""
    known: dict[str, Reference] = {}

    def get(**options: object) -> Reference:
        key = repr(sorted(options.items()))
        if key not in known:
            path: Path = tmp_path_factory.mktemp("tiny")
            known[key] = load(path, **options)
        return known[key]

    return get
