"""Which data sets a command line names, and in which proportion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class Source:
    """A data set and its weight in a blend."""

    path: Path
    weight: float = 1.0


def parse_sources(words: Sequence[str]) -> list[Source]:
    """Read ``PATH`` or ``WEIGHT PATH WEIGHT PATH ...``, as in Megatron's ``--data-path``.

    Raises:
        BadInput: numbers and paths do not alternate.
    """
    if len(words) == 1:
        return [Source(Path(words[0]))]
    weights, paths = words[0::2], words[1::2]
    try:
        numbers = [float(weight) for weight in weights]
    except ValueError:
        numbers = []
    if not words or len(numbers) != len(paths) or min(numbers) <= 0:
        raise BadInput(
            f"The data path {' '.join(words)!r} is neither one path nor positive weights and paths "
            "in turn, like '0.3 a.jsonl 0.7 b.jsonl'."
        )
    return [Source(Path(path), number) for path, number in zip(paths, numbers, strict=True)]
