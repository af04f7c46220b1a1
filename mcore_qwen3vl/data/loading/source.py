"""A data set as a command line or a mixture file describes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mcore_qwen3vl.data.config import MediaLimits
from mcore_qwen3vl.data.records.reading import Reading


@dataclass(frozen=True)
class Source:
    """A data set, its weight in a blend, and how its records are read."""

    path: Path
    weight: float = 1.0
    epochs: float | None = None
    """How often the data set is read in an epoch of the blend; set for all data sets or none."""
    reading: Reading = field(default_factory=Reading)
    media_root: Path | None = None
    """Folder that relative paths of media start from; None: the data's own folder."""
    limits: MediaLimits = field(default_factory=MediaLimits)
    """Budgets of this data set; those that are set replace the run's."""
    max_samples: int | None = None
    """Number of samples to read, from the first; None: all."""
