"""One working directory that the parts of a conversion fill side by side, on any machines.

The directory, its journal and its tree are those of `staging`, and so is how the result appears.
``parts`` beside them states the work that the parts divide. A part holds ``part-I.lock`` as long as
it runs, and ``parts.lock`` only while it begins, adds a line to the journal, or publishes.

What other parts have finished is read from the journal alone, a file that was there when this part
began: on a network file system a name that another machine makes may be seen a minute late.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mcore_qwen3vl.converters.storage.staging import (
    JOURNAL,
    LOCK,
    PARTS,
    REPLACED,
    TREE,
    Staging,
    append_durably,
    check_target,
    cut_torn_line,
    journal_line,
    put_right,
    results_in,
    work_folder,
    write_durably,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_links
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.part import Part

_PARTS_LOCK = "parts.lock"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_PATIENCE = 2
"""Seconds to wait for a process that only looks whether it may write, and is refused."""
_SHOWN = 80  # characters of a value that a message shows


class PartStaging(Staging):
    """The working directory of a conversion in parts, as one part has it; see `part_staging`.

    While it is held, no other part begins, adds to the journal or publishes.
    """

    def __init__(
        self,
        target: Path,
        fingerprint: str,
        depends: Mapping[str, Any],
        *,
        force: bool,
        held: ExitStack,
    ) -> None:
        folder = work_folder(target)
        then = _stated(folder / PARTS) if (folder / TREE).exists() else None
        if then is not None:
            _require_same(folder, target, then, depends)
        super().__init__(target, fingerprint, force=force)
        if then is None:
            write_durably(folder / PARTS, json.dumps(depends).encode())
        self._held = held

    def hold(self) -> None:
        """Wait until no other process holds the directory, and hold it."""
        for name in (_PARTS_LOCK, LOCK):
            self._held.enter_context(_lock(self.folder / name))

    def release(self) -> None:
        """Let other parts go on."""
        self._held.close()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let other parts go on during the body; then `done` has what all have finished."""
        self.release()
        yield
        self.hold()
        self.done = results_in(self.read_journal())

    def record_finished(self, unit: str, result: Any) -> None:
        with self._lock, _lock(self.folder / _PARTS_LOCK):
            self.record_held(unit, result)

    def record_held(self, unit: str, result: Any) -> None:
        """Do as `record_finished`, while the directory is held."""
        self._append(unit, result)
        self.done[unit] = result

    def strike(self, unit: str) -> None:
        """Record that the file of a finished unit is lost; the directory must be held."""
        self._append(unit, None)
        del self.done[unit]

    def _append(self, unit: str, result: Any) -> None:
        cut_torn_line(self.journal)  # another part may have died while it wrote
        append_durably(self.journal, journal_line({"unit": unit, "result": result}))


@contextmanager
def part_staging(
    target: Path,
    part: Part,
    fingerprint: str,
    depends: Mapping[str, Any],
    *,
    force: bool,
    replaceable: Callable[[Path], bool],
) -> Iterator[PartStaging]:
    """Yield the working directory of all parts, held; nobody else does the same part meanwhile.

    The work is kept after any exception: that of the other parts is in the same directory.

    Args:
        fingerprint: identifies the plan, as for `staging`, whose other arguments are the same too.
        depends: what must be the same for all parts, by its name in messages.

    Raises:
        BadInput: `check_target` raised it; the directory holds parts of other work, or somebody
            else writes the target or does this part; the directory cannot be created, is or
            holds a link, or its file system has no locks.
    """
    target = Path(os.path.abspath(target))
    folder = work_folder(target)
    mine = f"part-{part.index}.lock"
    ours = (folder / name for name in (mine, _PARTS_LOCK, LOCK, TREE, JOURNAL, REPLACED, PARTS))
    refuse_links(folder, *ours)
    with ExitStack() as running, ExitStack() as held:
        _hold_first(held, target, folder, force=force, replaceable=replaceable)
        whole = f"Another process is writing {target}, without --part."
        held.enter_context(_lock(folder / LOCK, _PATIENCE, whole))
        same = f"Another process is doing part {part} of {target}."
        running.enter_context(_lock(folder / mine, _PATIENCE, same))
        put_right(folder, target)
        check_target(target, force=force, replaceable=replaceable)
        plain = json.loads(json.dumps(depends))  # as it is read
        stage = PartStaging(target, fingerprint, plain, force=force, held=held)
        yield stage


def _hold_first(
    locks: ExitStack,
    target: Path,
    folder: Path,
    *,
    force: bool,
    replaceable: Callable[[Path], bool],
) -> None:
    """Create the directory, and wait until no other part holds it."""
    while True:
        check_target(target, force=force, replaceable=replaceable)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                locks.enter_context(_lock(folder / _PARTS_LOCK))
                if (folder / _PARTS_LOCK).exists():
                    return
        except OSError as error:
            raise BadInput(f"{target} cannot be written: {error}. Check its folder.") from None
        locks.close()  # the last part has published meanwhile, and deleted the directory


@contextmanager
def _lock(file: Path, seconds: float = -1, holder: str = "") -> Iterator[None]:
    """Hold a lock of the kernel's: a soft one would outlast a process that is killed.

    Wait for it without end, or only some seconds; then `holder` says who has it.
    """
    lock = FileLock(file, fallback_to_soft=False)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        raise BadInput(f"{holder} Wait for it, or choose another directory.") from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        raise BadInput(
            f"{file.parent} is on a file system without locks, which parts need: mount it with "
            "them (Lustre: -o flock), or convert in one process, without --part."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _stated(file: Path) -> dict[str, Any] | None:
    """Return what is stated of the work of parts; None if no part has begun."""
    try:
        stated = parse_json(file.read_bytes())
    except (FileNotFoundError, ValueError):  # or the first part died while it began
        return None
    return stated if isinstance(stated, dict) else None


def _require_same(
    folder: Path, target: Path, then: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise BadInput if the parts in a directory are of other work than this command's."""
    other = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    if not other:
        return
    name = other[0]
    values = [json.dumps(each.get(name)) for each in (then, now)]
    told = f": {values[0]} there, {values[1]} here" if max(map(len, values)) < _SHOWN else ""
    raise BadInput(
        f"{folder} holds parts of another conversion to {target}, which differs in {name}{told}. "
        f"Give every part the same source and flags, or delete {folder} and begin anew."
    )
