"""Child processes and temporary folders that do not outlive the process they were made for."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_qwen3vl import safe_path

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_REMOVE = """
trap '' HUP INT QUIT TERM
read -r _
rm -rf -- "$1" || { sleep 1; rm -rf -- "$1"; }
"""
"""The script waits until the last process that holds the other end of the pipe has ended. Ranks are
killed at the same time, and one may still write a file during the removal: hence the second try."""


def how_it_ended(code: int) -> str:
    """Say how a process ended, given its exit code (negative: the number of a signal)."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however the parent ends.

    Call it first in a process that works for another one. Linux treats the thread that started the
    process as its parent, so that thread must outlive the process. Other systems offer nothing
    similar, and this function does nothing there. By default the parent is the process that
    :mod:`multiprocessing` knows.
    """
    if sys.platform != "linux":
        return
    if parent is None:
        started_by = multiprocessing.parent_process()
        assert started_by is not None, "only in a process that multiprocessing has started"
        parent = started_by.pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def protected_children() -> Iterator[None]:
    """Have children that start inside the context import nothing from the current folder.

    Unlike :func:`.safe_path.protect_children`, it leaves the environment of the caller's program
    as it was.
    """
    before = os.environ.get(safe_path.VARIABLE)
    safe_path.protect_children()
    try:
        yield
    finally:
        del os.environ[safe_path.VARIABLE]
        if before is not None:
            os.environ[safe_path.VARIABLE] = before


@contextmanager
def scratch_folder(prefix: str = "mcore-qwen3vl-", parent: Path | None = None) -> Iterator[Path]:
    """Make a temporary folder, in `parent` or the system's, that is always removed.

    A shell waits until this process, which may be killed, and those forked from it have ended.
    """
    temporary = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
    remover = subprocess.Popen(
        ["/bin/sh", "-c", _REMOVE, "remover", os.path.abspath(temporary.name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # a terminal's signals and its closing must not end it
    )
    try:
        with temporary as folder:
            yield Path(folder)
    finally:
        remover.kill()  # the folder is gone, so it has nothing left to do
        remover.communicate()


@contextmanager
def noting_ctrl_c() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C came inside the context.

    Python drops the exception where it is raised in the middle of a fork, and a library that the
    signal meets in a child may raise something else.
    """
    came = False

    def note_and_raise(*_: object) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def raise_if_it_came() -> None:
        if came:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or (
        threading.current_thread() is not threading.main_thread()
    ):  # somebody else decides what Ctrl-C does
        yield raise_if_it_came
        return
    signal.signal(signal.SIGINT, note_and_raise)
    try:
        yield raise_if_it_came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
