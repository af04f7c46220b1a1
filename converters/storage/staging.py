"""Write a directory so that it appears complete or not at all, and resume after an interruption.

Work happens in a hidden directory beside the target: ``tree/`` becomes the result and ``journal``
records each finished unit of work. The target appears by one rename. A run that finds the remains
of an interrupted run with the same plan continues from its journal; remains of another plan are
deleted. What the target replaces waits in ``replaced`` while the new one is renamed.

A run that was killed or failed while it published left one of two states. The next run puts this
right before anything else. If ``tree`` is still there and the target is not, ``replaced`` is put
back. If ``tree`` has become the target, what is left of ``replaced`` is deleted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.files import hidden_beside, refuse_links

Progress = Callable[[int, int, str], None]
"""Called as work proceeds with the bytes done, the bytes in all, and the name of a tensor."""


class Meter:
    """A thread-safe sum of the bytes that several workers have moved."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress
        self._lock = threading.Lock()

    def add(self, nbytes: int, name: str) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total, name)


TREE, REPLACED, JOURNAL = "tree", "replaced", "journal"
PARTS = "parts"
"""What the parts of a conversion have in common, if it is done in parts; see `part_staging`."""

log = logging.getLogger(__name__)


class Staging:
    """The working directory of one conversion.

    Attributes:
        tree: the directory to fill.
        done: results of the finished units, by unit name; at first those of an interrupted run.
    """

    def __init__(self, target: Path, fingerprint: str | None, *, force: bool) -> None:
        self.target, self._force = target, force
        self.folder = work_folder(target)
        self.tree = self.folder / TREE
        self.journal = self.folder / JOURNAL
        self._lock = threading.Lock()
        header = journal_line({"plan": fingerprint})
        lines = self.read_journal()
        if fingerprint is None or not lines or lines[0] != header:
            shutil.rmtree(self.tree, ignore_errors=True)
            lines = [header]
            write_durably(self.journal, header)
        self.done = results_in(lines)
        self.tree.mkdir(exist_ok=True)

    def record_finished(self, unit: str, result: Any) -> None:
        """Record in the journal that `unit` is durably written, with its `result`."""
        with self._lock:
            append_durably(self.journal, journal_line({"unit": unit, "result": result}))
            self.done[unit] = result

    def publish(self) -> None:
        """Rename the tree to the target; with `force`, replace an existing target.

        Raises:
            BadInput: the target was moved away and could not be put back, or was published and may
                not outlast a crash of the machine; the message says where everything is.
            OSError: the tree could not be published; the target is as it was.
        """
        for folder, _, _ in self.tree.walk():
            sync_folder(folder)
        replaces = self._force and self.target.exists()
        if replaces:
            self.target.rename(self.folder / REPLACED)
        try:
            self.tree.rename(self.target)
        except OSError as error:
            if replaces:
                self._put_back(error)
            raise
        try:
            sync_folder(self.target.parent)
        except OSError as error:
            old = f" What it replaced is in {self.folder / REPLACED}." if replaces else ""
            raise BadInput(
                f"{self.target} is complete, but the system did not confirm that it would outlast "
                f"a power failure: {error}. Check the disk.{old}"
            ) from error
        try:
            shutil.rmtree(self.folder)
        except OSError as error:
            log.warning(
                "%s is complete, but %s beside it could not be deleted: %s. Delete it, or let the "
                "next command that writes there do so.",
                self.target,
                self.folder.name,
                error,
            )

    def _put_back(self, cause: OSError) -> None:
        """Put the old target back."""
        try:
            (self.folder / REPLACED).rename(self.target)
        except OSError:
            raise BadInput(
                f"{self.target} could not be replaced: {cause}. The old one is in "
                f"{self.folder / REPLACED}, and running the same command again puts it back."
            ) from cause

    def read_journal(self) -> list[bytes]:
        """Return the journal's lines; cut off a last one that a run died while writing."""
        if not self.journal.exists() or not self.tree.exists():
            return []
        cut_torn_line(self.journal)
        return self.journal.read_bytes().splitlines(keepends=True)


def journal_line(content: dict[str, Any]) -> bytes:
    """Return a line of a journal."""
    return json.dumps(content).encode() + b"\n"


def results_in(lines: list[bytes]) -> dict[str, Any]:
    """Return the results in a journal's lines by unit; the first line is its header.

    A unit whose last result is null is not finished.
    """
    records = (json.loads(line) for line in lines[1:])
    results = {record["unit"]: record["result"] for record in records}
    return {unit: result for unit, result in results.items() if result is not None}


@contextmanager
def staging(
    target: Path, fingerprint: str | None, *, force: bool, replaceable: Callable[[Path], bool]
) -> Iterator[Staging]:
    """Yield a `Staging` that no other process uses at the same time.

    If the body raises `BadInput` or `CheckFailed`, the work is deleted; after any other exception
    it is kept, so that a later run can resume it.

    Args:
        fingerprint: identifies the plan; only a run with the same fingerprint is resumed, and none
            without a fingerprint.
        force: whether to replace an existing target, if it is `replaceable`.
        replaceable: tells whether an existing directory may be deleted.

    Raises:
        BadInput: `check_target` raised it; another process is writing the target; its directory
            cannot be created; the working directory is or holds a link; or parts of a conversion
            are in it.
    """
    target = Path(os.path.abspath(target))
    check_target(target, force=force, replaceable=replaceable)
    folder = work_folder(target)
    refuse_links(folder, *(folder / name for name in (LOCK, TREE, JOURNAL, REPLACED)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout:
        raise BadInput(
            f"another process is writing {target}. Wait for it, or choose another directory."
        ) from None
    except OSError as error:
        raise BadInput(f"{target} cannot be written: {error}. Check its folder.") from None
    with lock:
        try:
            put_right(folder, target)
        except OSError as error:
            raise BadInput(
                f"{folder}, which an interrupted command has left, cannot be put right: {error}. "
                "Check the disk."
            ) from None
        check_target(target, force=force, replaceable=replaceable)
        if (folder / TREE).exists() and (folder / PARTS).exists():
            raise BadInput(
                f"{folder} holds parts of a conversion to {target}: do the missing ones with "
                "--part, or delete it and run this command again."
            )
        (folder / PARTS).unlink(missing_ok=True)
        try:
            yield Staging(target, fingerprint, force=force)
        except (BadInput, CheckFailed):  # running again would only stop again
            if not (folder / REPLACED).exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise


def discard_remains(target: Path) -> bool:
    """Delete what a killed run has left of its work on `target`; return whether there was any.

    What that run had moved away is put back. No other process may be writing `target`. If the
    system refuses, the log says so.
    """
    folder = work_folder(Path(os.path.abspath(target)))
    if not folder.exists():
        return False
    try:
        put_right(folder, target)
        shutil.rmtree(folder)
    except OSError as error:
        log.warning(
            "%s, which an interrupted command has left, cannot be deleted: %s", folder, error
        )
    return True


def put_right(folder: Path, target: Path) -> None:
    """Put back or delete what a run has left that was killed, or failed, while it published."""
    tree, replaced = folder / TREE, folder / REPLACED
    if not replaced.exists():
        return
    if tree.exists() and not os.path.lexists(target):
        replaced.rename(target)
        return
    # Without the tree, nobody takes a part of the old target for the whole.
    shutil.rmtree(tree, ignore_errors=True)
    shutil.rmtree(replaced)


_SUFFIX, LOCK = ".incomplete", "lock"


def work_folder(target: Path) -> Path:
    """Return the hidden working directory of `target`."""
    return hidden_beside(target, _SUFFIX)


def targets_of_remains(folder: Path) -> list[Path]:
    """Return the targets in `folder`, of uncut names, on which killed runs left work."""
    left = folder.glob(f".*{_SUFFIX}")
    return [folder / f.name.removeprefix(".").removesuffix(_SUFFIX) for f in left if f.is_dir()]


def check_target(target: Path, *, force: bool, replaceable: Callable[[Path], bool]) -> None:
    """Refuse a target that may not be written; the arguments are those of `staging`.

    Raises:
        BadInput: the target exists and `force` is not set, or it is not `replaceable`.
    """
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise BadInput(f"{target} exists. Remove it, choose another directory, or add --force.")
    if target.is_symlink() or not target.is_dir():
        raise BadInput(f"{target} is not a directory; --force replaces checkpoints only.")
    if any(target.iterdir()) and not replaceable(target):
        raise BadInput(
            f"{target} holds something other than a checkpoint; --force does not delete it. "
            "Choose another directory."
        )


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_durably(file: Path, line: bytes) -> None:
    """Add a line to a file."""
    with file.open("ab") as handle:
        handle.write(line)
        handle.flush()
        os.fsync(handle.fileno())


def cut_torn_line(file: Path) -> None:
    """Cut off a last line without an end, which a process died while writing."""
    with file.open("rb+") as handle:
        if handle.seek(0, os.SEEK_END) == 0:
            return
        handle.seek(-1, os.SEEK_END)
        if handle.read() != b"\n":
            handle.seek(0)
            handle.truncate(handle.read().rfind(b"\n") + 1)


def write_durably(file: Path, content: bytes) -> None:
    with file.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
