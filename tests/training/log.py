"""What a run wrote to its log, which `train` leaves in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Entries = list[dict[str, Any]]


def entries_of(folder: Path) -> Entries:
    """Return all entries, those of validations too."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def validation_losses(folder: Path) -> list[float]:
    name = "validation lm loss"
    return [entry[name] for entry in entries_of(folder) if name in entry]


def numbers_of(log: Entries) -> list[float]:
    """Return losses and gradient norms in turn, of curves that must be equal bit for bit."""
    return [entry[name] for entry in log for name in ("lm loss", "grad norm")]
