"""Choose which parameters train. Call it before the model is wrapped for data parallelism."""

from __future__ import annotations

import re

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

PARTS = {
    "vision": r"visual\.(?!merger\.|deepstack_merger_list\.)",
    "aligner": r"visual\.(merger|deepstack_merger_list)\.",
    "language": r"(?!visual\.)",
}
"""Names for the parts of the model; the aligner is the mergers, DeepStack's among them."""


def freeze(model: Qwen3VLModel, *patterns: str) -> list[str]:
    """Take parameters out of training.

    Args:
        model: one pipeline chunk.
        patterns: a part (``vision``, ``aligner``, ``language``) or a regular expression, matched
            from the start of parameter names as in ``decoder.layers.3.mlp.linear_fc1.weight``,
            with layers counted over the whole model.

    Returns:
        The names that were frozen in this chunk, which may be none of them.

    Raises:
        BadInput: a pattern is not a regular expression.
    """
    compiled = [compile_pattern(pattern) for pattern in patterns]
    frozen = []
    for name, parameter in model.named_parameters():
        name = global_name(model, name)
        if any(pattern.match(name) for pattern in compiled):
            parameter.requires_grad_(False)
            frozen.append(name)
    return frozen


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A part's name or a regular expression, to be matched from the start of a global name.

    Raises:
        BadInput: it is neither.
    """
    try:
        return re.compile(PARTS.get(pattern, pattern))
    except re.error as error:
        raise BadInput(
            f"{pattern!r} is neither one of {', '.join(PARTS)} nor a regular expression: {error}."
        ) from None


def global_name(model: Qwen3VLModel, name: str) -> str:
    """A parameter's name with its layer's number in the whole model, not in this chunk."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if not match:
        return name
    number = model.decoder.layers[int(match[1])].layer_number - 1
    return f"decoder.layers.{number}.{name[match.end() :]}"
