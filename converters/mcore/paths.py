"""The names in a Megatron checkpoint directory: the tracker, the iterations' folders, ``hf/``."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.untrusted import refuse_special_files

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
HF_FOLDER = "hf"
LORA_FOLDER = "lora"
"""Beside the checkpoints of a LoRA run: the config of its adapter."""


def tracked(path: Path) -> str | int | None:
    """What the tracker in `path` names: an iteration, or `RELEASE`; None if there is no tracker.

    Raises:
        BadInput: the tracker is unreadable, or says something else.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    try:
        said = tracker.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise BadInput(f"{tracker} cannot be read: {error}. Write the iteration into it.") from None
    if said == RELEASE:
        return RELEASE
    if not said.isdigit():
        raise BadInput(
            f"{tracker} says {said[:40]!r}; a number or 'release' is expected. Write the newest "
            "iteration into it."
        )
    return int(said)


def folder_name(iteration: str | int) -> str:
    """The folder of an iteration, or of `RELEASE`, in its checkpoint directory."""
    return f"iter_{iteration:07d}" if isinstance(iteration, int) else iteration


def iteration_folder(path: Path) -> Path:
    """The folder of the newest iteration, or `path` itself if it is such a folder.

    Raises:
        BadInput: the tracker is unreadable or names an iteration that is not there, or the folder
            holds what is no file.
    """
    newest = tracked(path)
    folder = path if newest is None else path / folder_name(newest)
    refuse_special_files(folder)
    if newest is None:
        return path
    if not folder.is_dir():
        raise BadInput(
            f"{path / TRACKER} names {folder.name}, but {folder} does not exist. Name another "
            "iteration's folder, or correct the tracker."
        )
    return folder


def require_whole_model(path: Path) -> None:
    """
    Raises:
        BadInput: `path`, or the run that it is an iteration of, trains an adapter alone.
    """
    for folder in (path, path.parent):
        if (folder / LORA_FOLDER / "adapter_config.json").is_file():
            raise BadInput(
                f"{folder} is a LoRA run, and its checkpoints hold no base weights. Run the "
                "command that trained it again with --save-hf DIR to write the adapter, then "
                "use `generate BASE --lora ADAPTER` or `lora merge BASE ADAPTER OUT`."
            )


def find_hf_folder(path: Path) -> Path | None:
    """The folder that holds the HF config of `path`, and the files beside it.

    Args:
        path: a Megatron checkpoint, one iteration of it, or an HF checkpoint, which is its own.

    Returns:
        None if there is none.
    """
    for folder in (path / HF_FOLDER, path, iteration_folder(path).parent / HF_FOLDER):
        if (folder / "config.json").is_file():
            return folder
    return None


def hf_folder(path: Path, *, flag: str = "--hf-config") -> Path:
    """Find the Hugging Face files of a checkpoint, or refuse; see `find_hf_folder`.

    Args:
        path: see there.
        flag: what names another folder, for the message.

    Raises:
        BadInput: there is no such folder.
    """
    folder = find_hf_folder(path)
    if folder is None:
        raise BadInput(
            f"{path} has no {HF_FOLDER}/config.json, so the model's shape is not known. Name a "
            f"directory with the Hugging Face config and tokenizer: {flag} DIR."
        )
    return folder


def config_folder(path: Path, *, flag: str = "--hf-config") -> Path:
    """Where config, tokenizer and processor of a checkpoint of either kind are, or should be.

    Args:
        path: an HF checkpoint, which is its own, or a Megatron one.
        flag: see `hf_folder`.

    Raises:
        BadInput: a Megatron checkpoint without such a folder.
    """
    if (path / TRACKER).is_file():
        return hf_folder(path, flag=flag)
    return find_hf_folder(path) or path
