"""Stop a process at a chosen write below a folder: it is killed there, or the system refuses."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CALLS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
_PASSING = ("logs", ".lock", "lock")
"""Parts of paths that are no result: a run's log, and locks."""


def at_write(
    folder: Path,
    number: int,
    act: Callable[[str, str], None],
    *,
    since: str = "",
    lasting: bool = False,
) -> None:
    """Call `act` before one write below `folder`, in this process, which can have no other hook.

    Files that C++ opens are noticed when they are renamed.

    Args:
        number: of the write, from 1.
        act: gets the name of the call and its path. What it raises is raised by the call.
        since: counting begins with the first path that has this part.
        lasting: call `act` before all later writes, too.
    """
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        for path in _written(event, args):
            inside = path.startswith(f"{folder}/") or not path.startswith("/")
            if inside and not any(part in _PASSING for part in Path(path).parts):
                count += bool(count or since in path)
                if count == number or (lasting and count > number):
                    count += 1  # `act` may write
                    act(event, path)

    sys.addaudithook(hook)
    fsync = os.fsync

    def audited_fsync(descriptor: int) -> None:
        sys.audit("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    os.fsync = audited_fsync


def _written(event: str, args: tuple[Any, ...]) -> Iterator[str]:
    """Yield the path that an audited call writes to, if it writes to one.

    `shutil.rmtree` removes a file by its name in an open folder, so such a path is relative.
    """
    if event == "open":
        path, _, flags = args
        if isinstance(path, str | bytes | Path) and flags & _WRITING:
            yield os.path.abspath(os.fsdecode(path))
    elif event in _CALLS or event == "os.fsync":
        path = os.fsdecode(args[0])
        in_open_folder = isinstance(args[-1], int) and args[-1] >= 0
        yield path if in_open_folder else os.path.abspath(path)


def kill_at(folder: Path, number: int, since: str = "") -> None:
    """Kill this process at a write below `folder`, as the system does: nothing is cleaned up.

    A file that is about to be opened is left empty, as if the first write to it were the last.
    """

    def act(call: str, path: str) -> None:
        if call == "open":
            Path(path).write_bytes(b"")
        os.kill(os.getpid(), signal.SIGKILL)

    at_write(folder, number, act, since=since)


def refuse_at(folder: Path, number: int, *, lasting: bool = False) -> None:
    """Let one write below `folder`, or all from there on, fail with EIO."""

    def act(call: str, path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    at_write(folder, number, act, lasting=lasting)
