"""The parameters that train in an adapted model: factors, and tensors that train whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from mcore_qwen3vl.converters.adapters.peft_model import EMBEDDING, HEAD
from mcore_qwen3vl.converters.live.sharded import hf_parts
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.freeze import Freezing, global_name
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel


def freezing() -> Freezing:
    """Return a choice in which only adapters train; :func:`whole` gives patterns to add."""
    return Freezing(trainable=[r"adapter\."])


def whole(chunk: Qwen3VLModel, saved: Collection[str]) -> Iterator[str]:
    """Yield patterns for ``Freezing.train``: the parameters of `chunk` that hold `saved`.

    Args:
        chunk: a pipeline chunk of any layout.
        saved: Hugging Face names of parameters that train whole. A tied head means the embedding
            too.

    Raises:
        BadInput: Megatron holds one of `saved` in one weight with others that do not train.
    """
    names = set(saved)
    if names & {HEAD, EMBEDDING} and chunk.architecture.tie_word_embeddings:
        names |= {HEAD, EMBEDDING}
    held: dict[str, set[str]] = {}
    for part in hf_parts(chunk):
        held.setdefault(part.parameter, set()).add(part.name)
    for parameter, sources in held.items():
        if not sources & names:
            continue
        if alone := sorted(sources - names):
            raise BadInput(
                f"Megatron stores {', '.join(sorted(sources & names))} in one weight with "
                f"{', '.join(alone)}, so modules_to_save must name all of them or none: add the "
                "others, or train them with an adapter."
            )
        yield re.escape(global_name(chunk, parameter)) + "$"


def trained_names(chunk: Qwen3VLModel) -> set[str]:
    """Return the local names of the parameters that train, a tied one under all its names."""
    named = chunk.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter.requires_grad}
