"""Where the data stood, beside each checkpoint: saved before it, so that a complete checkpoint
always has it; read back when training resumes, for any number of data-parallel ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.data.loading.loader import Loader
from mcore_qwen3vl.data.loading.state import redistribute
from mcore_qwen3vl.errors import BadInput

FOLDER = "dataloader"


def folder_of(checkpoints: str | Path, iteration: int) -> Path:
    """Where the states of `iteration` are, below the checkpoint directory."""
    return Path(checkpoints) / FOLDER / f"iter_{iteration:07d}"


def save(loader: Loader, checkpoints: str | Path, iteration: int, dp_rank: int) -> None:
    """Write one data-parallel rank's state; appears whole or not at all."""
    folder = folder_of(checkpoints, iteration)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank_{dp_rank:05d}.pt"
    partial = file.with_suffix(f".{os.getpid()}.tmp")
    torch.save(loader.state_dict(), partial)
    os.replace(partial, file)


def load(
    loader: Loader, checkpoints: str | Path, iteration: int, dp_rank: int, dp_size: int
) -> None:
    """Let `loader` continue where the checkpoint of `iteration` was written.

    Raises:
        BadInput: no state was saved with that checkpoint, or it does not fit this run.
    """
    folder = folder_of(checkpoints, iteration)
    files = sorted(folder.glob("rank_*.pt"))
    if not files:
        raise BadInput(
            f"{folder} holds no data state, so training cannot continue with the next sample. If "
            "the data should start from the beginning, load the checkpoint with --finetune."
        )
    if len(files) == dp_size:
        state = _read(files[dp_rank])
    else:
        state = redistribute([_read(file) for file in files], dp_size)[dp_rank]
    loader.load_state_dict(state)


def _read(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state
