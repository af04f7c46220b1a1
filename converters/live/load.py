"""Load a checkpoint of either kind into a running model of any layout: :func:`load_weights`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.companions import read_form
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.hf.hub import resolve
from mcore_qwen3vl.converters.live.sharded import Models, hf_parts, mcore_pieces, table_of, unwrap
from mcore_qwen3vl.converters.mapping.forms import CLASSIFIER, HEADLESS, SCORE, TIED_COPY, head_of
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.converters.megatron_checkpoint import format_of, open_megatron
from mcore_qwen3vl.converters.place import Kind, Place, identify
from mcore_qwen3vl.errors import BadInput


def load_weights(models: Models, place: Place, *, spare_value_head: bool = False) -> None:
    """Fill the model chunks of this rank from a checkpoint of either kind, or from a hub id's.

    See :func:`load_checkpoint` and :func:`load_hf`, which this calls.
    """
    if place.kind is Kind.HUB_ID:
        place = identify(resolve(place.path))
    if place.kind in (Kind.HUGGINGFACE, Kind.CONFIG):
        load_hf(models, place.path, spare_value_head=spare_value_head)
    else:  # an iteration, perhaps a half-written one
        load_checkpoint(models, place.path)


def load_hf(models: Models, path: str | Path, *, spare_value_head: bool = False) -> int:
    """Fill every parameter from a Hugging Face checkpoint; a rank reads only what it holds.

    Values are cast to the parameters' dtype. If the optimizer keeps float32 copies, call
    ``optimizer.reload_model_params()`` afterwards.

    Args:
        spare_value_head: leave the model's value head as it is if the checkpoint has none.

    Returns:
        Bytes of tensor data that this rank read.

    Raises:
        BadInput: the checkpoint does not hold exactly this model's tensors, or its config gives
            settings that they do not show and the model has others.
    """
    path = Path(path)
    chunks = unwrap(models)
    identify(path).require_huggingface()
    checkpoint = HuggingFaceCheckpoint(path)
    layout = Architecture.from_hf(path).expert_layout
    stored = checkpoint.form.head
    spared = spare_value_head and stored.kind != CLASSIFIER
    headless = head_of(chunks[0].head_labels).kind == HEADLESS  # a head that is stored is not read
    head = stored if spared or headless or stored.kind == TIED_COPY else None
    checkpoint.require(table_of(chunks, layout, head=head, mtp=checkpoint.has_mtp))
    chunks[0].architecture.require_settings_of(path)
    read = 0
    with torch.no_grad():
        zero_padding(chunks)
        for part in hf_parts(chunks, expert_layout=layout):
            if spared and part.name == SCORE:
                continue
            part.local.copy_(checkpoint.read_tensor(part.name, part.box, part.local.dtype))
            read += checkpoint.read_stored(part.name, part.box).nbytes
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


def load_checkpoint(models: Models, path: str | Path) -> None:
    """Fill the model chunks of this rank from a checkpoint; a rank reads only what it holds.

    Optimizer and random states in the checkpoint are ignored, and keys of another maker translated.

    Args:
        models: this rank's chunks (several under VPP), or some of them.

    Raises:
        BadInput: there is no checkpoint, it has the legacy format or an unknown maker's keys, or
            its keys or shapes are not exactly the model's, or its config's settings differ.
    """
    place = identify(path)
    place.require_megatron()
    place.require_base()
    folder = place.weights()
    chunks = unwrap(models)
    labels, architecture = chunks[0].head_labels, chunks[0].architecture
    if labels is None and place.hf is not None:
        read_form(place.hf).require_language_model(folder)
    if (format := format_of(place)).plan is not None:
        raise BadInput(
            f"{folder} is of {format.title}, which loads only under its own layout. Export it "
            "first: mcore-qwen3vl convert mcore-to-hf."
        )
    checkpoint = open_megatron(place, architecture)
    rows = table(
        architecture,
        padded_vocab_size=checkpoint.vocab_size,
        head=head_of(labels),
        mtp=checkpoint.has_mtp or chunks[0].has_mtp,
    )
    headless = labels is not None and not labels
    checkpoint.require(rows, unread=("output_layer.weight",) if headless else ())
    if place.hf is not None:
        architecture.require_settings_of(place.hf)
    with torch.no_grad():
        zero_padding(chunks)
        for _, row, piece in mcore_pieces(chunks):
            corner = piece.global_offset[piece.prepend_axis_num :]
            first, *columns = (
                slice(o, o + n) for o, n in zip(corner, piece.local_shape, strict=True)
            )
            # The checkpoint's vocabulary may be padded to another size than the model's.
            last = min(first.stop, row.shape[0] - row.rearrangement.padding)
            if first.start < last:
                values = checkpoint.read_box(row, (slice(first.start, last), *columns))
                piece.data[: len(values)].copy_(values)
