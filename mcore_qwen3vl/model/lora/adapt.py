"""Put an adapter that was read from files into a built model, and say what trains in it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Adapter
from mcore_qwen3vl.converters.live.sharded import hf_parts, load_factors
from mcore_qwen3vl.converters.mapping.forms import INPUT_EMBEDDING, LM_HEAD
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.freeze import Freezing, global_name
from mcore_qwen3vl.model.lora.attach import attach
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel


def adapt(chunks: Sequence[Qwen3VLModel], adapter: Adapter) -> Freezing:
    """Put `adapter` into the chunks of this rank: its factors, and the tensors that it holds whole.

    The chunks hold the adapter's base weights, and Megatron has not wrapped them. Apply the choice
    that is returned to every chunk, to train only what `adapter` holds.

    Raises:
        BadInput: see :func:`attach` and :func:`whole`.
    """
    choice = freezing()
    saved = whole_tensors(adapter)
    for chunk in chunks:
        attach(chunk, adapter.factors, dropout=adapter.config.lora_dropout)
        choice.train(whole(chunk, saved))
    load_factors(chunks, adapter.factors)
    load_saved(chunks, saved)
    return choice


def whole_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Return the tensors that `adapter` trains whole.

    The head's base weight, which PEFT stores beside its factors, is not one of them.
    """
    return {name: value for name, value in adapter.saved.items() if name not in adapter.factors}


def with_tied(architecture: Architecture, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `saved`, with the embedding added if it is tied to a head in `saved`."""
    saved = dict(saved)
    if architecture.tie_word_embeddings and LM_HEAD in saved:
        saved.setdefault(INPUT_EMBEDDING, saved[LM_HEAD])
    return saved


@torch.no_grad()
def load_saved(chunks: Sequence[Qwen3VLModel], saved: Mapping[str, Tensor]) -> None:
    """Overwrite base weights with the tensors in `saved`, by Hugging Face's names.

    Experts are laid out as in transformers 5. One name is enough for tied embeddings.
    """
    saved = with_tied(chunks[0].architecture, saved)
    for part in hf_parts(chunks, expert_layout="v5"):
        if part.name in saved:
            part.local.copy_(saved[part.name][part.box])


def freezing() -> Freezing:
    """Return a choice in which only adapters train; :func:`whole` gives patterns to add."""
    return Freezing(trainable=[r"adapter\."])


def whole(chunk: Qwen3VLModel, saved: Collection[str]) -> Iterator[str]:
    """Yield patterns for ``Freezing.train``: the parameters of `chunk` that hold `saved`.

    Those are Hugging Face's names of what trains whole. A tied head means the embedding too.

    Raises:
        BadInput: Megatron holds one of `saved` in one weight with others that do not train.
    """
    names = set(saved)
    if names & {LM_HEAD, INPUT_EMBEDDING} and chunk.architecture.tie_word_embeddings:
        names |= {LM_HEAD, INPUT_EMBEDDING}
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
