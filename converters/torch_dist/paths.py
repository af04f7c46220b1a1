"""The names in a Megatron checkpoint directory: the tracker, the iterations' folders, ``hf/``."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3vl.converters.torch_dist import metadata
from mcore_qwen3vl.errors import BadInput

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
HF_FOLDER = "hf"


def is_megatron(path: Path) -> bool:
    """Whether `path` looks like a Megatron checkpoint or one iteration of it."""
    known = (path / TRACKER).is_file() or (path / metadata.FILE).is_file()
    return known or any(path.glob("mp_rank_*"))


def iteration_folder(path: Path) -> Path:
    """The folder of the newest iteration, or `path` itself if it is such a folder.

    Raises:
        BadInput: the tracker file is unreadable or names an iteration that is not there.
    """
    if not (path / TRACKER).is_file():
        return path
    try:
        newest = (path / TRACKER).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path / TRACKER} cannot be read: {error}.") from None
    if newest != RELEASE and not newest.isdigit():
        raise BadInput(f"{path / TRACKER} says {newest[:40]!r}; a number or 'release' is expected.")
    folder = path / (RELEASE if newest == RELEASE else f"iter_{int(newest):07d}")
    if not folder.is_dir():
        raise BadInput(f"{path / TRACKER} names {folder.name}, but {folder} does not exist.")
    return folder


def hf_folder(source: Path, *, flag: str = "--hf-config") -> Path:
    """Where an mcore checkpoint keeps the HF config and its companions.

    Args:
        source: its directory, or the folder of one iteration.
        flag: what names another folder, for the message.

    Raises:
        BadInput: there is no such folder.
    """
    for folder in (source / HF_FOLDER, iteration_folder(source).parent / HF_FOLDER):
        if (folder / "config.json").is_file():
            return folder
    raise BadInput(
        f"{source} has no {HF_FOLDER}/config.json, so the model's shape is not known. Name a "
        f"directory with the Hugging Face config and tokenizer: {flag} DIR."
    )
