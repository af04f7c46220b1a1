"""Files of ours, which appear whole; those of others, found and checked."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mcore_qwen3vl.errors import BadInput

LONGEST_NAME = 255
"""Most bytes in a file's name on the file systems of Linux."""


def package_modules() -> dict[str, Path]:
    """Return the file of every module of this package by its path, such as ``converters/cost.py``.

    In a checkout ``converters`` and ``launch`` are links, and ``Path.rglob`` follows none.
    """
    root = Path(__file__).parent
    found = {}
    for folder, _, names in root.walk(follow_symlinks=True):
        for file in (folder / name for name in names if name.endswith(".py")):
            found[file.relative_to(root).as_posix()] = file
    return dict(sorted(found.items()))


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
