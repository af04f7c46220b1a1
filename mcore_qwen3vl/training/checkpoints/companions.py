"""The model's files beside the checkpoints that a run saves: config, tokenizer and processor."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from filecmp import cmp
from itertools import count
from pathlib import Path

import torch

from mcore_qwen3vl.config import Architecture, read_config_file, states_vision
from mcore_qwen3vl.converters.hf.companions import copy_companions, write_form
from mcore_qwen3vl.converters.hf.config_file import Changes, dtype_to_state
from mcore_qwen3vl.converters.hf.shards import TensorSpec
from mcore_qwen3vl.converters.identify import HF_FOLDER
from mcore_qwen3vl.converters.mapping.forms import Form, head_of, names_in_transformers
from mcore_qwen3vl.data.processor import configs_with_budgets
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write
from mcore_qwen3vl.training.arguments.settings import Settings

log = logging.getLogger(__name__)


def check_companions(directory: str | Path, architecture: Architecture) -> None:
    """Raise BadInput if the ``hf`` folder of `directory` describes another model."""
    folder = Path(directory) / HF_FOLDER
    if not folder.exists():
        return
    there = Architecture.from_hf(folder)
    free = ("dtype", "expert_layout", "initializer_range", "router_aux_loss_coef")
    if replace(there, **{name: getattr(architecture, name) for name in free}) != architecture:
        raise BadInput(
            f"{folder} describes another model than --hf-model: choose another directory to --save "
            "to, or remove it."
        )


def save_companions(settings: Settings) -> None:
    """Copy the files of ``--hf-model`` other than weights into the ``hf`` folder of ``--save``.

    A conversion does the same. With them, the checkpoints can be exported, compared and used for
    generation as they are; :func:`changed_files` says what differs. One rank calls this; the folder
    appears whole or not at all. One with other files, such as those of another model or half of
    these, is moved away first.
    """
    assert settings.checkpoints.save is not None
    folder, source = Path(settings.checkpoints.save) / HF_FOLDER, settings.model.folder
    with atomic_write(folder, remedy=None) as partial:
        labels, files = settings.labels, changed_files(settings)
        dtype = None
        if not settings.lora.trains_adapter:
            held = TensorSpec(getattr(torch, settings.compute.params_dtype), (1,))
            dtype = dtype_to_state(read_config_file(source), [held])
        copy_companions(source, partial, Changes(dtype=dtype, labels=labels, files=files))
        names = names_in_transformers(has_vision=states_vision(source))
        write_form(partial, Form(names, head_of(labels)))
        if folder.exists():
            _move_away(folder, partial)


def _move_away(folder: Path, wanted: Path) -> None:
    """Remove `folder`, whose place `wanted` takes; keep it under another name if it differs."""
    there, new = (
        {f.relative_to(d): f for f in d.rglob("*") if f.is_file()} for d in (folder, wanted)
    )
    if there.keys() == new.keys() and all(cmp(there[n], new[n], shallow=False) for n in new):
        shutil.rmtree(folder)
        return
    numbers = (folder.with_name(f"{folder.name}.replaced-{number}") for number in count(1))
    aside = next(place for place in numbers if not os.path.lexists(place))
    folder.rename(aside)
    log.warning(
        "%s held other files than this run's --hf-model: they are in %s now", folder, aside.name
    )


def changed_files(settings: Settings) -> dict[str, bytes]:
    """Return what a run writes otherwise than ``--hf-model`` has it, by file name."""
    # It imports the generation of transformers, which takes seconds.
    from mcore_qwen3vl.generation.sampling import config_with_turn_end

    source = settings.model.folder
    # A model that is trained on turns stops at their end.
    stopping = {} if settings.loss.flag == "--task" else config_with_turn_end(source)
    return {**configs_with_budgets(source, settings.data.media_limits), **stopping}
