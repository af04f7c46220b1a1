"""Load Hugging Face weights into a running, sharded model of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.live.sharded import hf_parts, table_of, unwrap
from mcore_qwen3vl.converters.mapping.forms import CLASSIFIER, HEADLESS, SCORE, TIED_COPY, head_of


def load_hf(
    models: nn.Module | Sequence[nn.Module], path: str | Path, *, spare_value_head: bool = False
) -> int:
    """Fill every parameter from a Hugging Face checkpoint; a rank reads only what it holds.

    Values are cast to the parameters' dtype. If the optimizer keeps float32 copies, call
    ``optimizer.reload_model_params()`` afterwards.

    Args:
        models: the model, or its virtual pipeline chunks, on any layout.
        path: checkpoint directory.
        spare_value_head: leave the model's value head as it is if the checkpoint has none.

    Returns:
        Bytes of tensor data that this rank read.

    Raises:
        BadInput: the checkpoint does not hold exactly this model's tensors.
    """
    path = Path(path)
    chunks = unwrap(models)
    checkpoint = HuggingFaceCheckpoint(path)
    layout = Architecture.from_hf(path).expert_layout
    stored = checkpoint.form.head
    spared = spare_value_head and stored.kind is not CLASSIFIER
    headless = head_of(chunks[0].head_labels).kind is HEADLESS  # a head that is stored is not read
    head = stored if spared or headless or stored.kind is TIED_COPY else None
    checkpoint.require(table_of(chunks, layout, head=head))
    read = 0
    with torch.no_grad():
        zero_padding(chunks)
        for part in hf_parts(chunks, expert_layout=layout):
            if spared and part.name == SCORE:
                continue
            part.local.copy_(checkpoint.read(part.name, part.box, part.local.dtype))
            read += checkpoint.stored(part.name, part.box).nbytes
    return read


def zero_padding(chunks: Sequence[Any]) -> None:
    """Zero the weights of a padded vocabulary, since the padding rows have no source.

    The offline conversion writes zeros there too.
    """
    for chunk in chunks:
        if chunk.vocab_size == chunk.architecture.vocab_size:
            continue
        for name, parameter in chunk.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                parameter.data.zero_()
