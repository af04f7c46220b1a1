"""One process writes a place at a time; the next one is told who does."""

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
    """Hold ``PLACE.lock`` (in `place`, if that is a folder) meanwhile.

    The lock is this process's, not its children's, and goes with it however it ends. Where the file
    system has no locks, nothing is held.

    Raises:
        BadInput: another process holds it; the message says which.
    """
    file = place / ".lock" if place.is_dir() else place.with_name(f"{place.name}.lock")
    lock = _locked(file, place)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # before it is released, so that it is still ours
        lock.close()


def _locked(file: Path, place: Path) -> TextIO:
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
        except OSError:  # the file system has none
            pass
        if _is_still(file, lock):
            break
        lock.close()  # the one who held it has removed it meanwhile
    # Unbuffered, and let it fail on a full disk: only the next one's message is the poorer for it.
    with suppress(OSError):
        os.truncate(file, 0)
        os.write(lock.fileno(), f"Process {os.getpid()} on {socket.gethostname()}".encode())
    return lock


def _is_still(file: Path, lock: TextIO) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False
