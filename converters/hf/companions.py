"""The small files beside the weights: config, tokenizer, processor, chat template and the rest."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mcore_qwen3vl.converters.hf.checkpoint import INDEX
from mcore_qwen3vl.converters.storage.staging import write_durably

LARGEST = 256 * 2**20
"""A bigger file is not a sidecar; `sidecar_files` leaves it out."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".distcp")


def sidecar_files(path: Path) -> dict[str, Path]:
    """Every small file of an HF checkpoint that is not weights, by relative path.

    Weights, their index, files over `LARGEST` and hidden directories (``.git``, ``.cache``) are
    left out. A link to a file counts as the file, since that is how the Hugging Face cache stores
    them; a link to a directory is not followed.
    """
    return {str(file.relative_to(path)): file for file in sorted(_walk(path)) if _is_sidecar(file)}


def copy_sidecars(files: dict[str, Path], target: Path, config: bytes | None = None) -> None:
    """Copy the content of `files` under `target`, durably; `config` replaces ``config.json``'s."""
    for name, file in files.items():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name == "config.json" and config is not None:
            write_durably(copy, config)
            continue
        shutil.copyfile(file, copy)
        with copy.open("rb+") as handle:
            os.fsync(handle.fileno())


def digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _walk(path: Path) -> Iterator[Path]:
    for folder, folders, files in path.walk():
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (folder / name for name in files)


def _is_sidecar(file: Path) -> bool:
    if file.name == INDEX or file.suffix in WEIGHTS or not file.is_file():
        return False
    return file.stat().st_size <= LARGEST
