"""The data sets that a command line names, with their proportions. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_qwen3vl.data.loading.mixture import Source, is_mixture, read_mixture
from mcore_qwen3vl.errors import BadInput

__all__ = ["Source", "parse_sources", "require_data_set", "source_names"]


def parse_sources(words: Sequence[str], preprocess: str | None = None) -> list[Source]:
    """Read ``PATH`` or ``WEIGHT PATH WEIGHT PATH ...``, as in Megatron's ``--data-path``.

    A mixture file among the paths is replaced by its data sets.

    Args:
        words: the words of the command line.
        preprocess: hook for the data sets that name none.

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
            "Some data sets have epochs and some have weights. Give all of them epochs, or all "
            "of them weights."
        )
    if preprocess is None:
        return sources
    return [
        replace(source, reading=replace(source.reading, preprocess=preprocess))
        if source.reading.preprocess is None
        else source
        for source in sources
    ]


def source_names(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return the name of each source in the log; nothing if all sources have the same name."""
    names = tuple(source.name or str(source.path) for source in sources)
    return names if len(set(names)) > 1 else ()


def require_data_set(path: Path) -> Path:
    """Return `path` if it exists.

    Raises:
        BadInput: `path` does not exist.
    """
    if not path.exists():
        raise BadInput(f"The data set {path} does not exist; check the path.")
    return path


def _expanded(path: Path, weight: float) -> list[Source]:
    if not is_mixture(path):
        return [Source(path, weight)]
    sources = read_mixture(path)
    total = sum(source.weight for source in sources)
    return [replace(source, weight=weight * source.weight / total) for source in sources]
