"""The run that a folder of checkpoints or exports belongs to, by an id in a file of the folder."""

from __future__ import annotations

import uuid
from pathlib import Path

FILE = ".run"


def owner_of(folder: str | Path | None) -> str | None:
    """Return the id of the run that `folder` belongs to; None if no run has claimed it."""
    file = folder and Path(folder) / FILE
    return file.read_text("utf-8").strip() if file and file.is_file() else None


def claim(save: str | None, exports: str) -> None:
    """Write a run's id into its folder of exports, and into its ``--save`` if it has one."""
    run = owner_of(save) or uuid.uuid4().hex
    for folder in filter(None, (save, exports)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / FILE).write_text(f"{run}\n", "utf-8")
