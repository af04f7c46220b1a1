"""Put an adapter that was read from files into a built model with its base weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.peft_model import EMBEDDING, HEAD
from mcore_qwen3vl.converters.live.factors import load_factors
from mcore_qwen3vl.converters.live.sharded import hf_parts
from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.lora.attach import attach
from mcore_qwen3vl.model.lora.trainable import freezing, whole
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel


class Read(Protocol):
    """The attributes of an adapter that this module uses.

    ``converters.adapters.adapter.Adapter`` has them; the model does not import converters.
    """

    @property
    def config(self) -> Any: ...

    @property
    def factors(self) -> Mapping[str, Any]: ...

    @property
    def saved(self) -> Mapping[str, Tensor]: ...


def adapt(chunks: Sequence[Qwen3VLModel], adapter: Read) -> Freezing:
    """Put `adapter` into the chunks of this rank: its factors, and the tensors that it holds whole.

    Args:
        chunks: this rank's chunks with the base weights of `adapter`, not wrapped by Megatron.
        adapter: an adapter read from a PEFT directory.

    Returns:
        The choice of what trains. Apply it to every chunk to train only what `adapter` holds.

    Raises:
        BadInput: `adapter` holds something that cannot be adapted or trained; see :func:`attach`
            and :func:`mcore_qwen3vl.model.lora.trainable.whole`.
    """
    choice = freezing()
    saved = whole_tensors(adapter)
    for chunk in chunks:
        attach(chunk, adapter.factors, dropout=adapter.config.lora_dropout)
        choice.train(whole(chunk, saved))
    load_factors(chunks, adapter.factors)
    load_saved(chunks, saved)
    return choice


def whole_tensors(adapter: Read) -> dict[str, Tensor]:
    """Return the tensors that `adapter` trains whole.

    The head's base weight, which PEFT stores beside its factors, is not one of them.
    """
    return {name: value for name, value in adapter.saved.items() if name not in adapter.factors}


def with_tied(architecture: Architecture, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `saved`, with the embedding added if it is tied to a head in `saved`."""
    saved = dict(saved)
    if architecture.tie_word_embeddings and HEAD in saved:
        saved.setdefault(EMBEDDING, saved[HEAD])
    return saved


@torch.no_grad()
def load_saved(chunks: Sequence[Qwen3VLModel], saved: Mapping[str, Tensor]) -> None:
    """Overwrite base weights with the tensors in `saved`.

    Args:
        chunks: this rank's chunks.
        saved: values by Hugging Face parameter name, with experts laid out as in transformers 5.
            One name is enough for tied embeddings.
    """
    saved = with_tied(chunks[0].architecture, saved)
    for part in hf_parts(chunks, expert_layout="v5"):
        if part.name in saved:
            part.local.copy_(saved[part.name][part.box])
