"""Reports on the progress of a long operation."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called as work proceeds with the bytes done, the bytes in all, and the name of a tensor."""


class Meter:
    """A thread-safe sum of the bytes that several workers have moved."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress
        self._lock = threading.Lock()

    def add(self, nbytes: int, name: str) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total, name)
