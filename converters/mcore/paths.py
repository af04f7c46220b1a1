"""Names in a Megatron checkpoint directory: the tracker, the iterations' folders, ``hf/``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mcore_qwen3vl.config import read_config_file
from mcore_qwen3vl.converters.hf.companions import read_form
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_special_files
from mcore_qwen3vl.labels import Labels

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
HF_FOLDER = "hf"
LONGEST_ITERATION = 18
"""Most digits in an iteration's number, which megatron keeps in 64 bits."""
VERL_HF_FOLDER = "huggingface"
VERL_FOLDERS = ("dist_ckpt", "model/dist_ckpt", "actor/dist_ckpt", "actor/model/dist_ckpt")
"""Where VERL saves Megatron's weights, below ``global_step_N`` or its ``actor`` folder.

Since 0.9 they are in ``model``. `VERL_HF_FOLDER` is beside each. VERL 0.9 makes both folders in
every save and leaves one empty unless it was told to save both kinds of weights.
"""
ADAPTER_CONFIG = "adapter_config.json"
LORA_FOLDER = "lora"
"""Folder in a LoRA run's checkpoint directory that holds the adapter's config."""


def tracked(path: Path) -> str | int | None:
    """Return what the tracker in `path` names: an iteration, `RELEASE`, or None without a tracker.

    Raises:
        BadInput: the tracker is unreadable, or names neither an iteration nor `RELEASE`.
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
    if not said.isdigit() or len(said) > LONGEST_ITERATION:
        raise BadInput(
            f"{tracker} says {said[:40]!r}; a number or 'release' is expected. Write the newest "
            "iteration into it."
        )
    return int(said)


def folder_name(iteration: str | int) -> str:
    """Return the name of the folder of an iteration, or of `RELEASE`."""
    return f"iter_{iteration:07d}" if isinstance(iteration, int) else iteration


def numbered_iterations(path: Path) -> list[int]:
    """Return the numbers of the iterations whose folders are in `path`, in ascending order."""
    named = (re.fullmatch(r"iter_(\d+)", folder.name) for folder in path.glob("iter_*"))
    return sorted(int(match[1]) for match in named if match)


def verl_step(path: Path) -> Path:
    """Return the newest ``global_step_N`` if `path` is a run of VERL's; other paths unchanged.

    Raises:
        BadInput: see `tracked`.
    """
    step = path / f"global_step_{tracked(path)}"
    return step if step.is_dir() else path


def verl_weights(path: Path) -> Path:
    """Return the folder of Megatron's weights in VERL's folder `path`; other paths unchanged."""
    places = (path / place for place in VERL_FOLDERS)
    return next((place for place in places if any(place.glob("*"))), path)


def verl_huggingface(path: Path) -> Path | None:
    """Return the Hugging Face weights in VERL's folder `path`, which holds none of Megatron's."""
    places = ((path / place).parent / VERL_HF_FOLDER for place in VERL_FOLDERS)
    return next((place for place in places if (place / "config.json").is_file()), None)


def swift_checkpoint(path: Path) -> Path | None:
    """Return the newest ``checkpoint-N`` below `path` if that is a run of ms-swift's."""
    named = ((re.fullmatch(r"checkpoint-(\d+)", f.name), f) for f in path.glob("checkpoint-*"))
    steps = {int(match[1]): f for match, f in named if match and (f / TRACKER).is_file()}
    return steps[max(steps)] if steps else None


def swift_adapter(path: Path) -> Path | None:
    """Return the folder of the adapter that ms-swift trained and saved as PEFT at `path` too.

    It is `path`, or the folder whose iteration that is.
    """
    return next((f for f in (path, path.parent) if _is_swift_adapter(f)), None)


def _is_swift_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file() and (folder / TRACKER).is_file()


def iteration_folder(path: Path) -> Path:
    """Return the folder of the newest iteration, or `path` itself if it has no tracker.

    For a folder of VERL's, it is the one that holds Megatron's weights.

    Raises:
        BadInput: the tracker is unreadable or names an iteration that does not exist, or the
            folder holds a special file.
    """
    newest, step = tracked(path), verl_step(path)
    folder = verl_weights(step)
    if newest is not None and step == path:
        folder = path / folder_name(newest)
    refuse_special_files(folder)
    if newest is None:
        return folder
    if not folder.is_dir():
        raise BadInput(
            f"{path / TRACKER} names {folder.name}, but {folder} does not exist. Name another "
            "iteration's folder, or correct the tracker."
        )
    return folder


def require_whole_model(path: Path) -> None:
    """Raise BadInput if `path`, or the run whose iteration it is, trains only an adapter."""
    for folder in (path, path.parent):
        if (folder / LORA_FOLDER / ADAPTER_CONFIG).is_file():
            raise BadInput(
                f"{folder} is a LoRA run, and its checkpoints hold no base weights. Run the "
                "command that trained it again with --save-hf DIR to write the adapter, then "
                "use `generate BASE --lora ADAPTER` or `lora merge BASE ADAPTER OUT`."
            )


def require_language_model(path: Path) -> None:
    """Raise BadInput if what was converted to `path` had no language model's head."""
    folder = find_hf_folder(path)
    if folder is not None:
        read_form(folder).require_language_model(path)


def require_classifier(path: Path, labels: Labels) -> None:
    """Raise BadInput if the checkpoint at `path` has no classifier's head with these labels."""
    folder = find_hf_folder(path)
    if folder is None:
        return
    if read_form(folder).head.labels != len(labels):
        raise BadInput(
            f"{path} has no classifier's head of {len(labels)} labels to go on with. To begin from "
            "a language model, name its Hugging Face weights with --load-hf."
        )
    there = Labels.of_config(read_config_file(folder))
    if labels.problem_type and there != labels:
        raise BadInput(
            f"{path} was trained with the labels {there}, and the data or flags say {labels}: go "
            "on with the same data and --problem-type."
        )


def find_hf_folder(path: Path) -> Path | None:
    """Return the folder of the HF config and the files beside it, or None if there is none.

    An HF checkpoint is its own config folder.
    """
    return next((f for f in _config_places(path) if (f / "config.json").is_file()), None)


def _config_places(path: Path) -> Iterator[Path]:
    """Yield the folders that may hold the config; the tracker is read for the later ones only."""
    yield path / HF_FOLDER
    yield path
    iteration = iteration_folder(path)
    yield iteration / HF_FOLDER  # Megatron-Bridge's also_save_hf_checkpoint
    yield iteration.parent / HF_FOLDER
    yield iteration.parent / VERL_HF_FOLDER
    if (iteration.parent / TRACKER).is_file():  # ms-swift's save_safetensors
        yield iteration.parent


def hf_folder(path: Path, *, flag: str = "--hf-config") -> Path:
    """Return what `find_hf_folder` finds.

    Raises:
        BadInput: there is no such folder; the message names the option, `flag`, that names another.
    """
    folder = find_hf_folder(path)
    if folder is None:
        raise BadInput(
            f"{path} has no {HF_FOLDER}/config.json, so the model's shape is not known. Name a "
            f"directory with the Hugging Face config and tokenizer: {flag} DIR."
        )
    return folder


def config_folder(path: Path) -> Path:
    """Return the folder where a checkpoint's config, tokenizer and processor are, or should be.

    Raises:
        BadInput: a Megatron checkpoint has no such folder.
    """
    if (path / TRACKER).is_file():
        return hf_folder(path)
    return find_hf_folder(path) or path
