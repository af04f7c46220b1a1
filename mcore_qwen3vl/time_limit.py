"""Limits of time for what a foreign file can make slow: records, chat templates, patterns."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_AGAIN = 1.0  # seconds until it interrupts again: the code may catch the first interruption


@contextmanager
def time_limit(
    seconds: float, error: Callable[[], Exception], *, of_processor: bool = False
) -> Iterator[None]:
    """Interrupt the code in the block with `error`, once its time is up.

    If limits of one kind are nested, the outermost one applies. Only the main thread is
    interrupted, and C code only when it returns to Python or, as that of `re`, looks for signals.

    Args:
        seconds: the limit; none if it is not above 0.
        of_processor: count the processor's time of this process, which a busy machine or a slow
            disk does not lengthen, and not the clock's.
    """
    timer, number = signal.ITIMER_REAL, signal.SIGALRM
    if of_processor:
        timer, number = signal.ITIMER_VIRTUAL, signal.SIGVTALRM
    limited = signal.getitimer(timer)[0] > 0
    if seconds <= 0 or limited or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise error()

    before = signal.signal(number, interrupt)
    try:
        signal.setitimer(timer, seconds, _AGAIN)
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
