"""What torch says of a file that it will not unpickle, in one sentence."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

from mcore_qwen3vl.errors import BadInput

_NAMED = re.compile(r"GLOBAL (\S+)")


def refused_by_torch(place: str | Path, error: pickle.UnpicklingError) -> BadInput:
    """An error of ``torch.load(weights_only=True)``, without its pages on how to switch that off.

    Args:
        place: what was read.
        error: torch's.
    """
    if named := _NAMED.search(str(error)):
        return BadInput(
            f"{place} asks for {named[1]}, which has no place in a checkpoint. Refused: loading it "
            "could run code. Do not use this checkpoint with a tool that would."
        )
    return BadInput(f"{place} is damaged, or torch did not write it. Copy it again.")
