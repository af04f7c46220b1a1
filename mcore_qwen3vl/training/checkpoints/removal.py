"""Removing what a run has saved of an iteration."""

from __future__ import annotations

import shutil
from pathlib import Path

from mcore_qwen3vl.converters.identify import folder_name
from mcore_qwen3vl.training.checkpoints import data_state


def remove_checkpoint(save: str | Path, iteration: int, *, ignore_errors: bool = False) -> None:
    """Remove an iteration, whole or not, and the position in the data beside it."""
    weights = Path(save) / folder_name(iteration)
    for part in (weights, data_state.folder_of(save, iteration)):
        if part.is_symlink():
            part.unlink()
        elif part.exists():
            shutil.rmtree(part, ignore_errors=ignore_errors)
