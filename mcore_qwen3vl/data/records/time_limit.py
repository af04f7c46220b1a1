"""A sample that takes too long is interrupted, whatever it is waiting for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample

_AGAIN = 1.0  # seconds; a hook may catch the first interruption


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt what runs inside by SIGALRM, once its time is up.

    The outermost limit counts. Other threads than the main one are not interrupted, nor is C code
    until it returns to Python.

    Args:
        seconds: 0: however long.

    Raises:
        BadSample: time is up.
    """
    limited = signal.getitimer(signal.ITIMER_REAL)[0] > 0
    if seconds <= 0 or limited or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise BadSample(
            f"reading and decoding it takes more than {seconds:g} s (--max-sample-seconds)."
        )

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
