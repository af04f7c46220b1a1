"""A limit on the memory that Python takes in a test."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def little_memory(most: int = 32 * 2**20) -> Iterator[None]:
    """Check that Python's objects take at most this many bytes more; tensors do not count."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
