"""Nothing outlives the process that it was made for: no other process, no temporary folder."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_REMOVE = """
trap '' HUP INT QUIT TERM
read -r _
rm -rf -- "$1" || { sleep 1; rm -rf -- "$1"; }
"""
"""Ends its wait when the last process that holds the other end of the pipe has ended. The ranks are
killed at the same time, and one may still write a file while the folder goes."""


def death(code: int) -> str:
    """Say how a process ended whose exit code is `code`: a signal's number, negated, or its own."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process once the one that started it has ended, in whichever way.

    Call it first in a process that works for another one. Linux takes the thread that started it
    for the parent: that thread must stay until the process has ended. Other systems have nothing
    of the kind, and nothing is done there.

    Args:
        parent: process ID of the parent; None: as :mod:`multiprocessing` knows it.
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
def scratch_folder(prefix: str = "mcore-qwen3vl-", parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder, which is removed even where this process is killed.

    A shell waits for that beside it. Forked processes keep the folder until they have ended too.

    Args:
        prefix: how its name begins.
        parent: where it is made; None: in the system's temporary folder.
    """
    temporary = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
    remover = subprocess.Popen(
        ["/bin/sh", "-c", _REMOVE, "remover", os.path.abspath(temporary.name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # a terminal's signals, and its end, are not for it
    )
    try:
        with temporary as folder:
            yield Path(folder)
    finally:
        remover.kill()
        remover.communicate()


def leave_at_once(code: int = 0) -> NoReturn:
    """End this process and those that it started with :mod:`multiprocessing`.

    Without the rest of the interpreter's own end, which takes seconds once PyTorch is imported.

    Args:
        code: the exit code.
    """
    # What atexit would call: it shuts managers down, and joins children.
    util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
