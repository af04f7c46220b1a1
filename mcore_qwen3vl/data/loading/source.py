"""A data set, as a command line or a mixture file names it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mcore_qwen3vl.data.config import MediaLimits
from mcore_qwen3vl.data.records.reading import Reading


@dataclass(frozen=True)
class Source:
    """A data set, its weight in a blend, and what is said of its records."""

    path: Path
    weight: float = 1.0
    epochs: float | None = None
    """How often it comes in an epoch of the whole; for all data sets of a blend, or for none."""
    reading: Reading = field(default_factory=Reading)
    media_root: Path | None = None
    """Where relative paths of media start; None: beside the data."""
    limits: MediaLimits = field(default_factory=MediaLimits)
    """On top of the run's."""
    max_samples: int | None = None
    """Its first ones; None: all."""
