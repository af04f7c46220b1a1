"""A lock that lets one process at a time write to a place and names its holder to the next."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from mcore_qwen3vl.errors import BadInput


@contextmanager
def only_writer(place: Path) -> Iterator[None]:
    """Hold ``PLACE.lock``, or ``PLACE/.lock`` if `place` is a folder, while the body runs.

    The lock belongs to this process, not to its children, and is released however the process ends.
    Where the file system has no locks, nothing is locked.

    Raises:
        BadInput: the folder does not exist, or another process holds the lock, which the message
            names.
    """
    file = place / ".lock" if place.is_dir() else place.with_name(f"{place.name}.lock")
    lock = _locked(file, place)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # before the lock is released, while the file is still ours
        lock.close()


def _locked(file: Path, place: Path) -> TextIO:
    if not file.parent.is_dir():
        raise BadInput(f"There is no folder {file.parent} for {place}: create it, or correct it.")
    while True:
        lock = file.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            lock.seek(0)
            holder = lock.read().strip() or "Another process"
            lock.close()
            raise BadInput(
                f"{holder} is writing to {place}. Wait until it has ended, or name another place."
            ) from None
        except OSError:  # the file system has no locks
            pass
        with suppress(FileNotFoundError):
            if os.path.samestat(file.stat(), os.fstat(lock.fileno())):
                break
        lock.close()  # the previous holder has removed the file meanwhile
    # Unbuffered. It may fail on a full disk: then only the message to the next process says less.
    with suppress(OSError):
        os.truncate(file, 0)
        os.write(lock.fileno(), f"Process {os.getpid()} on {socket.gethostname()}".encode())
    return lock
