"""Which data sets a command line names, and in which proportion. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcore_qwen3vl.data.config import MediaLimits
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.errors import BadInput


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


def parse_sources(words: Sequence[str], preprocess: str | None = None) -> list[Source]:
    """Read ``PATH`` or ``WEIGHT PATH WEIGHT PATH ...``, as in Megatron's ``--data-path``.

    A mixture file among the paths is replaced by its data sets.

    Args:
        words: of the command line.
        preprocess: hook of the data sets that name none.

    Raises:
        BadInput: numbers and paths do not alternate, or a mixture file is malformed.
    """
    if len(words) == 1:
        sources = _expanded(Path(words[0]), 1.0)
    else:
        weights, paths = words[0::2], words[1::2]
        try:
            numbers = [float(weight) for weight in weights]
        except ValueError:
            numbers = []
        if not words or len(numbers) != len(paths) or min(numbers) <= 0:
            raise BadInput(
                f"The data path {' '.join(words)!r} is neither one path nor positive weights and "
                "paths in turn, like '0.3 a.jsonl 0.7 b.jsonl'."
            )
        sources = [
            source
            for path, number in zip(paths, numbers, strict=True)
            for source in _expanded(Path(path), number)
        ]
    if len({source.epochs is None for source in sources}) > 1:
        raise BadInput(
            "Some data sets have epochs and some have weights: give all of them the same of the "
            "two. An epoch is of everything together, and weights have none."
        )
    if preprocess is None:
        return sources
    return [
        replace(source, reading=replace(source.reading, preprocess=preprocess))
        if source.reading.preprocess is None
        else source
        for source in sources
    ]


def _expanded(path: Path, weight: float) -> list[Source]:
    from mcore_qwen3vl.data.loading.mixture import is_mixture, read_mixture

    if not is_mixture(path):
        return [Source(path, weight)]
    sources = read_mixture(path)
    total = sum(source.weight for source in sources)
    return [replace(source, weight=weight * source.weight / total) for source in sources]
