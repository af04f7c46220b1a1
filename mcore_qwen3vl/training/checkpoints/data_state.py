"""The position in the data, saved beside each checkpoint.

It is saved first, so that a complete checkpoint always has it. Each file says how many ranks its
save had, and only their files are read. When training resumes, they serve any number of
data-parallel ranks.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.converters.identify import folder_name
from mcore_qwen3vl.converters.storage.archive import FAILURES, torch_refusal_error
from mcore_qwen3vl.data.loader import Loader
from mcore_qwen3vl.data.loader_state import redistribute
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write, refuse_special_files

FOLDER = "dataloader"


def folder_of(checkpoints: str | Path, iteration: int) -> Path:
    """Return the folder of an iteration's states, below the checkpoint directory."""
    return Path(checkpoints) / FOLDER / folder_name(iteration)


def _file_of(checkpoints: str | Path, iteration: int, dp_rank: int) -> Path:
    """Return the file of one data-parallel rank's state."""
    return folder_of(checkpoints, iteration) / f"rank_{dp_rank:05d}.pt"


def save(
    loader: Loader,
    checkpoints: str | Path,
    iteration: int,
    dp_rank: int,
    position: Any = None,
) -> None:
    """Write one data-parallel rank's state; the file appears whole or not at all.

    Args:
        position: result of :meth:`Loader.position` to save; None: the loader's current position.
    """
    file = _file_of(checkpoints, iteration, dp_rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    state = io.BytesIO()  # torch would hide that a disk is full, if it wrote the file
    torch.save(loader.state_dict(position), state)
    with atomic_write(file, remedy=None) as partial:
        partial.write_bytes(state.getvalue())


def remove_orphans(checkpoints: str | Path, iteration: int) -> None:
    """Remove the states before `iteration` whose checkpoints Megatron has removed."""
    for folder in (Path(checkpoints) / FOLDER).glob("iter_*"):
        orphan = not (Path(checkpoints) / folder.name).exists()
        if orphan and folder.name < folder_name(iteration):
            shutil.rmtree(folder, ignore_errors=True)


def load(
    loader: Loader,
    checkpoints: str | Path,
    iteration: int,
    dp_rank: int,
    dp_size: int,
) -> None:
    """Let `loader` continue from where it stood at the checkpoint of `iteration`.

    It raises BadInput if no state was saved with it, or if that does not fit this run.
    """
    first = first_state_of(checkpoints, iteration)
    if first is None:
        raise BadInput(
            f"{folder_of(checkpoints, iteration)} holds no data state, so training cannot continue "
            "with the next sample. If the data should start from the beginning, load the "
            "checkpoint with --finetune."
        )
    ranks: int = first["world_size"]
    wanted = range(ranks) if ranks != dp_size else [dp_rank]
    states = [_read_state(_file_of(checkpoints, iteration, rank)) for rank in wanted]
    with name_unsound(checkpoints, iteration):
        state = states[0] if ranks == dp_size else redistribute(states, dp_size)[dp_rank]
        loader.load_state_dict(state)


def first_state_of(checkpoints: str | Path, iteration: int) -> dict[str, Any] | None:
    """Return the first data-parallel rank's state in a checkpoint; None if none was saved.

    Those of earlier versions have more than the loader's own state.
    """
    file = _file_of(checkpoints, iteration, 0)
    if not file.exists():
        return None
    refuse_special_files(file.parent)  # the files of all ranks: the others are read after this one
    return _read_state(file)


_OF_CONTENT = (
    *(AssertionError, AttributeError, LookupError, OverflowError, RuntimeError, TypeError),
    *(ValueError, ZeroDivisionError),
)
"""What a loader raises for a state with values that no loader wrote."""


@contextmanager
def name_unsound(checkpoints: str | Path, iteration: int) -> Iterator[None]:
    """Raise BadInput, which names the folder, where a loader cannot take the states in it."""
    try:
        yield
    except _OF_CONTENT as error:
        raise _unsound(folder_of(checkpoints, iteration), repr(error)) from error


def _unsound(place: Path, why: str) -> BadInput:
    return BadInput(
        f"{place} holds no position in the data that this version wrote ({why:.200}). Copy it "
        "again, or load the checkpoint with --finetune to begin with the first record."
    )


_LEAST = {"world_size": 1, "num_workers": 0, "rank": 0, "rows": 0, "start": 0, "first": 0, "end": 0}
_MOST = 2**62


def _require_counts(file: Path, state: Any) -> None:
    """Raise BadInput for a state whose counts are none: a loader would fail long after."""
    if not isinstance(state, dict) or "world_size" not in state or "num_workers" not in state:
        raise _unsound(file, f"a {type(state).__name__} without counts of ranks and workers")
    for name, least in _LEAST.items():
        value = state.get(name, least)
        # No end of an endless order; no rows where nothing was read since the start.
        is_none = value is None and name in ("end", "rows")
        if not is_none and not (type(value) is int and least <= value < _MOST):
            raise _unsound(file, f"{name} is {value!r:.40}")


def _read_state(file: Path) -> dict[str, Any]:
    """Read a file of :func:`save`, or raise BadInput if it is damaged or not plain data."""
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        raise torch_refusal_error(file, error) from None
    except FileNotFoundError:
        raise BadInput(
            f"{file} is missing, so training cannot continue with the next sample. Copy it again, "
            "or go on from an older checkpoint, with --load, --ckpt-step and another --save."
        ) from None
    except (OSError, *FAILURES) as error:  # of torch's unpickler, whatever the bytes mean to it
        raise BadInput(f"{file} is cut short or damaged ({error!r:.200}). Copy it again.") from None
    _require_counts(file, state)
    return state
