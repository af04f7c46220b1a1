"""Checks of what a command leaves on the machine after it ends, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

PATIENCE = 15.0
"""Seconds after the end until nothing may be left. PyTorch's data workers look for their parent
every five seconds; everything else ends within one, on a machine that is not busy."""

START = 300.0  # seconds that a command may take until a test ends it

Ending = Callable[[subprocess.Popen[bytes]], None]

ENDINGS: dict[str, Ending] = {
    "success": lambda process: None,
    "Ctrl-C": lambda process: os.killpg(process.pid, signal.SIGINT),
    "SIGTERM": lambda process: process.send_signal(signal.SIGTERM),
    "SIGKILL": lambda process: process.kill(),
    "SIGTERM to all": lambda process: _terminate_all(process.pid),
    "SIGKILL to the group": lambda process: os.killpg(process.pid, signal.SIGKILL),
}
"""A terminal sends Ctrl-C to all processes of the command, and a user's `kill` signals the first.
Slurm and systemd send SIGTERM to all that they find, and `timeout -k` SIGKILL to the group."""

_MARK = "LEFTOVERS_OF"
_SHARED = Path("/dev/shm")


def _terminate_all(process: int) -> None:
    first = psutil.Process(process)
    for one in (*first.children(recursive=True), first):
        with suppress(psutil.NoSuchProcess):
            one.terminate()


@dataclass(frozen=True)
class Left:
    """The leftovers of a command, `PATIENCE` seconds after its end."""

    exit_code: int
    printed: str
    processes: list[str]
    files: list[str]
    shared_memory: list[str]

    @property
    def anything(self) -> list[str]:
        """All leftovers as text. Sockets count too, as a process holds each one that listens."""
        return [*self.processes, *self.files, *self.shared_memory]


def run_and_end(
    command: Sequence[object],
    folder: Path,
    ending: str,
    *,
    processes: int = 1,
    ready: Callable[[Path], bool] = lambda temporary: True,
) -> Left:
    """Run a command in its own temporary folder, end it, and look for leftovers.

    Args:
        command: the words of the command.
        folder: the folder for its output, and for PyTorch's cache.
        ending: a name in `ENDINGS`.
        processes: the number of processes, its own included, that it must have when it is ended.
        ready: a condition, given its temporary folder, that must also hold then.

    Raises:
        AssertionError: the command ended before, or did not get so far in `START` seconds.
    """
    mark, output = uuid.uuid4().hex, folder / "printed"
    # pytest's own folder would not do: its path is too long for sockets.
    temporary = Path(tempfile.mkdtemp(prefix="leftovers-"))
    before = set(_SHARED.iterdir())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "TMPDIR": str(temporary), _MARK: mark, "OMP_NUM_THREADS": "1"}
    # PyTorch's own cache is shared by all runs and is no leftover.
    own["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )
    try:
        if ending != "success":
            _await(
                lambda: len(list(_marked(mark))) >= processes and ready(temporary), process, output
            )
        ENDINGS[ending](process)
        code = process.wait(START)
        return _look(mark, temporary, before, code, output)
    finally:
        for left in _marked(mark):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        process.wait()
        shutil.rmtree(temporary)


def heed_ctrl_c() -> None:
    """Let a process about to run a command obey SIGINT: a shell's background jobs ignore it, and
    the commands that a test starts would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _await(moment: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + START
    while not moment():
        assert process.poll() is None, f"it ended too early: {output.read_text()}"
        assert time.monotonic() < deadline, f"it did not get so far: {output.read_text()}"
        time.sleep(0.05)


def _look(mark: str, temporary: Path, before: set[Path], code: int, output: Path) -> Left:
    deadline = time.monotonic() + PATIENCE
    while True:
        left = Left(
            exit_code=code,
            printed=output.read_text(errors="replace"),
            processes=[_described(one) for one in _marked(mark)],
            files=sorted(str(file.relative_to(temporary)) for file in temporary.rglob("*")),
            shared_memory=_abandoned(set(_SHARED.iterdir()) - before),
        )
        if not left.anything or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _marked(mark: str) -> list[int]:
    """Return the processes that descend from the command, whatever their parent; no zombies."""
    wanted, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process may end meanwhile, or be another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _described(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"process {process}"
    return f"process {process}: {b' '.join(words).decode(errors='replace')[:200]}"


def _abandoned(entries: set[Path]) -> list[str]:
    """Return entries that no process maps; what another program uses meanwhile is not ours."""
    if not entries:
        return []
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            used += maps.read_text()
    return sorted(str(entry) for entry in entries if str(entry) not in used)
