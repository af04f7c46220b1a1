"""A lock by which a place has one writer."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_links


@contextmanager
def only_writer(place: Path) -> Iterator[None]:
    """Hold ``PLACE.lock``, or ``PLACE/.lock`` if `place` is a folder, while the body runs.

    The lock belongs to this process, not to its children, and is released however the process ends.
    Where the file system has no locks, nothing is locked.

    Raises:
        BadInput: the folder does not exist, the lock's file is a link, or another process holds the
            lock, which the message names.
    """
    file = place / ".lock" if place.is_dir() else place.with_name(f"{place.name}.lock")
    if not file.parent.is_dir():
        raise BadInput(f"There is no folder {file.parent} for {place}: create it, or correct it.")
    refuse_links(file)
    lock = FileLock(file, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        holder = ""
        with suppress(OSError):
            holder = file.read_text(encoding="utf-8").strip()
        raise BadInput(
            f"{holder or 'Another process'} is writing to {place}. Wait until it has ended, or "
            "name another place."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    # On a full disk, only the message to the next process says less.
    with suppress(OSError):
        file.write_text(f"Process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # before the lock is released, while the file is still ours
        lock.release()
