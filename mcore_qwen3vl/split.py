"""A reader of ``--pipeline-model-parallel-layout``, which says what each virtual stage holds.

``E|ttt|(tt|)*4L`` has seven virtual stages: the embedding (and with it the vision tower) alone,
three decoder layers, four stages of two, and the head alone. mcore's own reader
(``PipelineParallelLayerLayout``) needs all of megatron, which must not be imported before the CPU
backend is installed; a test checks that the two agree.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mcore_qwen3vl.errors import BadInput

_GROUP = re.compile(r"\(([^()]+)\)\*([0-9]+)")
_REPEATED = re.compile(r"([^()*])\*([0-9]+)")


class Stage(NamedTuple):
    """One virtual stage."""

    embedding: bool
    layers: int
    head: bool


def read_split(text: str) -> list[Stage]:
    """Return the virtual stages that `text` describes, in the order of the model.

    Raises:
        BadInput: `text` has another form, or does not have one embedding at its beginning and one
            head at its end.
    """
    plain = text.replace(",", "")
    for pattern in (_GROUP, _REPEATED):
        plain = pattern.sub(lambda match: match[1] * int(match[2]), plain)
    if wrong := re.search(r"[^EtL|]", plain):
        raise BadInput(
            f"The pipeline split {text!r} is not understood at {wrong[0]!r}: write E (embedding "
            "and vision tower), t (a decoder layer), L (head) and | between stages. t*3 and "
            "(tt|)*2 repeat."
        )
    order = plain.replace("|", "")
    if not re.fullmatch("Et*L", order):
        raise BadInput(
            f"The pipeline split {text!r} must have one E, which comes first, and one L, which "
            "comes last."
        )
    return [Stage("E" in part, part.count("t"), "L" in part) for part in plain.split("|")]
