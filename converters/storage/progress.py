"""How far a long operation has come."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called as work proceeds with bytes done, bytes in all, and the tensor being written."""


class Meter:
    """Adds up what several workers move."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress
        self._lock = threading.Lock()

    def add(self, nbytes: int, name: str) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total, name)
