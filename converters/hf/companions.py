"""The small files beside the weights: config, tokenizer, processor, chat template and the rest."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from mcore_qwen3vl.config import read_config_file
from mcore_qwen3vl.converters.hf.config_file import UNCHANGED, Changes
from mcore_qwen3vl.converters.hf.form_file import FILE as FORM_FILE
from mcore_qwen3vl.converters.hf.hf_checkpoint import INDEX
from mcore_qwen3vl.converters.storage.staging import write_durably
from mcore_qwen3vl.files import refuse_links_out

LARGEST = 256 * 2**20
"""Largest size of a companion file, in bytes."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".distcp")


def companion_files(path: Path) -> dict[str, Path]:
    """Return every small file of an HF checkpoint that is not weights, by relative path.

    Weights, their index, the record of their form, files over `LARGEST` and hidden directories
    (``.git``, ``.cache``) are left out. A link to a file counts as the file, since the Hugging Face
    cache stores files as links; a link to a directory is not followed.

    Raises:
        BadInput: a file is a link that leads out of the checkpoint.
    """
    found: list[Path] = []
    for folder, folders, files in path.walk():
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += (folder / name for name in files if _is_companion(folder / name))
    found.sort()
    refuse_links_out(found, path)
    return {str(file.relative_to(path)): file for file in found}


def copy_companions(source: Path, target: Path, changes: Changes = UNCHANGED) -> None:
    """Copy the companion files in `source`, durably, to go beside converted weights in `target`.

    `changes` says how the weights in `target` differ from those of `source`.

    Raises:
        BadInput: the config cannot be read.
        OSError: reading or writing failed.
    """
    config = changes.config(read_config_file(source))
    for name, file in companion_files(source).items():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name == "config.json" and config is not None:
            write_durably(copy, config)
            continue
        shutil.copyfile(file, copy)
        with copy.open("rb+") as handle:
            os.fsync(handle.fileno())


def digest(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _is_companion(file: Path) -> bool:
    if file.name in (INDEX, FORM_FILE) or file.suffix in WEIGHTS or not file.is_file():
        return False
    return file.stat().st_size <= LARGEST
