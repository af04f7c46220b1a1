"""A one-sentence error for a file that torch refuses to unpickle."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

from mcore_qwen3vl.errors import BadInput

_NAMED = re.compile(r"GLOBAL (\S+)")


def refused_by_torch(place: str | Path, error: pickle.UnpicklingError) -> BadInput:
    """Turn an error of ``torch.load(weights_only=True)`` into BadInput, without its long advice.

    Args:
        place: the file, or part of it, that was read.
        error: torch's error.
    """
    if named := _NAMED.search(str(error)):
        return BadInput(
            f"{place} asks for {named[1]}, which has no place in a checkpoint. Refused: loading it "
            "could run code. Do not use this checkpoint with a tool that would."
        )
    return BadInput(f"{place} is damaged, or torch did not write it. Copy it again.")
