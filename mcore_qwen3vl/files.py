"""Files of ours, which appear whole and have one writer; HTML pages; others, found and checked."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from mcore_qwen3vl.errors import BadInput

if TYPE_CHECKING:
    from jinja2 import Environment


LONGEST_NAME = 255
"""Most bytes in a file's name on the file systems of Linux."""


def hidden_beside(target: Path, end: str) -> Path:
    """Return the path of a hidden file beside `target`, named for it and ending in `end`.

    A name that would be too long for the file system is cut, and its hash tells it from others.
    """
    name = target.name
    if len(os.fsencode(f".{name}{end}")) > LONGEST_NAME:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        name = os.fsdecode(os.fsencode(name)[: LONGEST_NAME - 32 - len(os.fsencode(end))]) + digest
    return target.with_name(f".{name}{end}")


def refuse_undecodable(words: Iterable[str]) -> None:
    """Raise BadInput for a word of the command line, such as a path, that is no UTF-8."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = word.encode("utf-8", "backslashreplace").decode()
            raise BadInput(
                f"{shown} is no UTF-8, and safetensors and tokenizers open no such path: rename it."
            ) from None


@contextmanager
def atomic_write(
    target: Path, remedy: str | None = "Make room, or name another place."
) -> Iterator[Path]:
    """Yield a name beside `target` for a file or folder, which is renamed to `target` at the end.

    A folder that is replaced is empty or does not exist. A device or a pipe such as ``/dev/stdout``
    is written to directly. After an error, nothing is left behind.

    Raises:
        BadInput: the system refuses to write; the message names `target` and the `remedy`.
        OSError: the same, if `remedy` is None.
    """
    target = Path(os.path.realpath(target))  # a link stays, and what it points to is replaced
    if target.exists() and not (target.is_file() or target.is_dir()):
        yield target
        return
    partial = hidden_beside(target, f".{os.getpid()}.tmp")
    try:
        yield partial
        os.replace(partial, target)
    except Exception as error:
        reason = str(error.strerror if isinstance(error, OSError) else error)
        # Libraries written in Rust (safetensors, tokenizers) raise their own errors, not OSError.
        refused = isinstance(error, OSError) or "(os error " in reason
        if remedy is None or not refused:
            raise
        raise BadInput(f"{target} cannot be written: {reason}. {remedy}") from None
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink()


def write_at_once(file: Path, text: str, remedy: str | None = None) -> None:
    """Write a text file by :func:`atomic_write`; if this process is killed, the old one stays.

    Raises:
        BadInput, OSError: those of :func:`atomic_write`.
    """
    with atomic_write(file, remedy) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Do as :func:`atomic_write`, for a folder that must be empty or not exist yet."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} exists and is not an empty directory: name another one.")
    with atomic_write(target) as partial:
        partial.mkdir(parents=True)
        yield partial


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


def templates(package: str) -> Environment:
    """Return a package's ``*.jinja`` templates of HTML pages, which can include ``pages.css``.

    Values are escaped, and a missing value is an error.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("mcore_qwen3vl", ".")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Parse JSON.

    Raises:
        ValueError: `text` is not JSON, or is nested more deeply than Python can read; or with
            `unique` an object has a key twice, where Python would take the last value.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:  # whose line is that of `text`, not of a file
        raise ValueError(f"no valid JSON: {error.msg}, at character {error.pos + 1:,}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of `pairs`; raise ValueError for a key with two values."""
    made = dict(pairs)
    if len(made) < len(pairs):
        first: dict[str, Any] = {}
        for key, value in pairs:
            if first.setdefault(key, value) != value:
                raise ValueError(f"the key {key[:40]!r} comes twice, with other values: keep one")
    return made


MOST_VALUES = 1_000_000
"""Most values in a YAML file whose aliases are written out."""


_MOST_BITS = 1024  # YAML has integers in bases that Python writes no message of


def require_spelled_out(content: Any) -> Any:
    """Return what a YAML file holds, if it is not huge with each alias (``*name``) written out.

    A few lines of aliases of aliases stand for billions of values, and whoever walks through them,
    or prints them in a message, never ends.

    Raises:
        ValueError: it has more than `MOST_VALUES` values or a huge integer, or contains itself.
    """
    sizes: dict[int, int] = {}

    def size(value: Any) -> int:
        if not isinstance(value, list | dict):
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise ValueError("it has an integer of hundreds of digits")
            return 1
        if (known := sizes.get(id(value))) is not None:
            if not known:
                raise ValueError("it contains itself")
            return known
        sizes[id(value)] = 0  # not known yet
        parts = value if isinstance(value, list) else [*value, *value.values()]
        sizes[id(value)] = 1 + sum(map(size, parts))
        return sizes[id(value)]

    if size(content) > MOST_VALUES:
        raise ValueError(f"its aliases stand for more than {MOST_VALUES:,} values")
    return content


def read_object(path: Path, name: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a file, or in the file `name` of a directory.

    Raises:
        BadInput: there is no such file, or it holds something else.
    """
    refuse_special_files(path)
    file = path / name if path.is_dir() else path
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist. {where}; check the path.") from None
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{file} cannot be read as JSON: {error!s:.200}. Copy the file again."
        ) from None
    if not isinstance(content, dict):
        raise BadInput(
            f"{file} holds {type(content).__name__}, not a JSON object. Copy the file again."
        )
    return content


def read_object_or_empty(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, as :func:`read_object` does; empty if there is no file.

    A folder or a pipe of that name is no file: opening a pipe could wait for ever.
    """
    return read_object(file, file.name, "") if file.is_file() else {}


_TEXTS = (".json", ".jinja", ".txt", ".yaml")
_LARGEST_TEXT = 2**30
"""Most bytes in a text beside weights, which is read whole; those of known models have 2**25."""


def refuse_special_files(folder: Path, *, of_data: bool = False) -> None:
    """Raise BadInput if `folder` directly holds a pipe, a socket or a device, or a link to one.

    It also raises for links that lead in a circle, and for a text too large to be a model's. A text
    of data may have any size.
    """
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                ordinary = entry.is_file() or entry.is_dir()
            except OSError as error:
                raise BadInput(
                    f"{entry.path} cannot be looked at: {error.strerror}. Remove it, or put the "
                    "file itself there."
                ) from None
            if not ordinary and os.path.exists(entry):
                raise BadInput(
                    f"{entry.path} is a pipe, a socket or a device, or a link to one, which cannot "
                    "be read here. Put the file itself there."
                )
            if of_data or not entry.name.endswith(_TEXTS) or not entry.is_file():
                continue
            # A file with holes takes no room on the disk, and fills the memory all the same.
            if (size := entry.stat().st_size) > _LARGEST_TEXT:
                raise BadInput(
                    f"{entry.path} has {size:,} bytes, which no such file of a model has. Copy it "
                    "again."
                )


def refuse_links(*ours: Path) -> None:
    """Raise BadInput if one of our own working files is a link: we make none.

    A downloaded folder may hold a link, and writing through it would overwrite another file.
    """
    for file in ours:
        if file.is_symlink():
            raise BadInput(
                f"{file} is a link to {os.readlink(file)}, which this command would write to: "
                "delete the link, or name another place to write."
            )


def refuse_links_out(files: Iterable[Path], folder: Path) -> None:
    """Raise BadInput if a file that will be copied is a link out of the model's folder.

    The content of copied files may be published with the converted model. In the Hugging Face
    cache, files may be in ``blobs`` beside the model's folder.
    """
    inside = folder.resolve()
    if inside.parent.name == "snapshots":
        inside = inside.parent.parent
    for file in files:
        if not (real := file.resolve()).is_relative_to(inside):
            raise BadInput(
                f"{file} is a link to {real}, outside of the model, and would be copied with it. "
                f"If that is meant, name a folder with the files themselves: cp -rL {folder} NEW."
            )


def files_below(path: Path, ends: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of a folder, at any depth, whose names end so.

    There may be a million others, such as images: no `Path` is made of these.
    """
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names if name.endswith(ends))
