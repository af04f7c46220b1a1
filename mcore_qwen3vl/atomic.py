"""Files and folders that appear whole or not at all, however full the disk is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mcore_qwen3vl.errors import BadInput


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a name beside `target` for a file or folder, which is renamed to `target` at the end.

    Raises:
        OSError: the system refuses to write; nothing is left behind.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield partial
        os.replace(partial, target)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink()


@contextmanager
def atomic_write(target: Path, remedy: str = "Make room, or name another place.") -> Iterator[Path]:
    """Do as :func:`replacing`, with an error that names `target` and the remedy.

    Args:
        target: a file, or a folder that is empty or does not exist. A device or a pipe such as
            ``/dev/stdout`` is written to directly.
        remedy: the last sentence of the error message.

    Raises:
        BadInput: the system refuses to write; nothing is left behind.
    """
    target = Path(os.path.realpath(target))
    if target.exists() and not (target.is_file() or target.is_dir()):
        yield target
        return
    try:
        with replacing(target) as partial:
            yield partial
    except Exception as error:
        reason = str(error.strerror if isinstance(error, OSError) else error)
        # Libraries written in Rust (safetensors, tokenizers) raise their own errors, not OSError.
        if not isinstance(error, OSError) and "(os error " not in reason:
            raise
        raise BadInput(f"{target} cannot be written: {reason}. {remedy}") from None


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Do as :func:`atomic_write`, for a folder that must be empty or not exist yet.

    Raises:
        BadInput: `target` exists and is not an empty folder, or the system refuses to write.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target} exists and is not an empty directory: name another one.")
    with atomic_write(target) as partial:
        partial.mkdir(parents=True)
        yield partial
