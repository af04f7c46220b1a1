"""The reasons for which a sample is not used, such as that reading it takes too long."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mcore_qwen3vl.errors import BadInput

_AGAIN = 1.0  # seconds until it interrupts again: a hook may catch the first interruption


class BadSample(Exception):
    """The sample cannot be used, and the message says why. The loader skips it."""


class OverlongSample(Exception):
    """The sample is longer than the sequence length, and the policy is to leave it out."""


def reason_of(error: Exception) -> str:
    """Return why a sample is bad: the message, after the type of an error that is not ours."""
    ours = isinstance(error, BadSample | OverlongSample | BadInput)
    return str(error) if ours else f"{type(error).__name__}: {error}"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the code in the block by SIGALRM, once its time is up.

    If limits are nested, the outermost one applies. Only the main thread is interrupted, and C code
    only when it returns to Python.
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
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
