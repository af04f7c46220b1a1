"""Load Hugging Face weights or a Megatron checkpoint into a running model of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.live.sharded import Models, hf_parts, mcore_pieces, table_of, unwrap
from mcore_qwen3vl.converters.mapping.dialects import maker_of
from mcore_qwen3vl.converters.mapping.forms import CLASSIFIER, HEADLESS, SCORE, TIED_COPY, head_of
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.converters.mcore.formats import format_of, open_megatron
from mcore_qwen3vl.converters.mcore.megatron_checkpoint import NOT_THE_MODEL
from mcore_qwen3vl.converters.mcore.paths import (
    iteration_folder,
    require_language_model,
    require_whole_model,
)
from mcore_qwen3vl.converters.storage.restricted_pickle import refused_by_torch
from mcore_qwen3vl.converters.torch_dist.metadata import guard_reads
from mcore_qwen3vl.converters.torch_dist.metadata import read as read_metadata
from mcore_qwen3vl.errors import BadInput


def load_hf(models: Models, path: str | Path, *, spare_value_head: bool = False) -> int:
    """Fill every parameter from a Hugging Face checkpoint; a rank reads only what it holds.

    Values are cast to the parameters' dtype. If the optimizer keeps float32 copies, call
    ``optimizer.reload_model_params()`` afterwards.

    Args:
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


def load_checkpoint(models: Sequence[Any], path: str | Path, *, whole: bool = True) -> None:
    """Fill the model chunks of this rank from a checkpoint; a collective of all ranks.

    Optimizer and random states in the checkpoint are ignored. Keys of another maker are translated:
    each rank then reads only what it holds.

    Args:
        models: this rank's chunks (several under VPP), not wrapped in DDP.
        whole: whether all ranks' `models` together are the whole model. Pass False for a single
            virtual stage; the checkpoint may then hold more than `models`.

    Raises:
        BadInput: there is no checkpoint, it has the legacy format or an unknown maker's keys, or
            its keys or shapes are not exactly the model's.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from torch.distributed.checkpoint.api import CheckpointException

    folder = iteration_folder(Path(path))
    require_whole_model(folder)
    labels = models[0].head_labels
    headless = labels is not None and not labels
    if labels is None:
        require_language_model(folder)
    guard_reads()
    if (format := format_of(folder)).plan is not None:
        raise BadInput(
            f"{folder} is of {format.title}, which loads only under its own layout. Export it "
            "first: mcore-qwen3vl convert mcore-to-hf."
        )
    index = read_metadata(folder)  # fail here: torch would try other files and log each failure
    if maker_of(folder, index.tensors) is not None:
        _load_translated(models, folder)
        return
    state = {f"model{i}": model.sharded_state_dict() for i, model in enumerate(models)}
    try:
        # mcore calls keys that the checkpoint lacks `unexpected`, and keys that it holds but the
        # model does not request `missing`.
        loaded, extra, lacking = dist_checkpointing.load(
            state, str(folder), strict=StrictHandling.RETURN_ALL, validate_access_integrity=whole
        )
    except CheckpointingException as error:
        raise _not_this_model(folder, str(error)) from error
    except UnpicklingError as error:  # a file that earlier Megatrons wrote
        raise refused_by_torch(folder / "common.pt", error) from None
    except CheckpointException as error:  # torch's wrapper of the failures of all ranks
        failures = [failure[0] for failure in error.failures.values()]
        refused = next((f for f in failures if isinstance(f, BadInput)), None)
        if refused is not None:
            raise refused from None
        for failure in failures:
            if isinstance(failure, UnpicklingError):
                raise refused_by_torch(folder, failure) from None
        raise _not_this_model(folder, str(failures[0])) from error
    extra = {key for key in extra if whole and not NOT_THE_MODEL.match(key)}
    if headless:
        extra.discard("output_layer.weight")
    for keys, problem in ((lacking, "lacks"), (extra, "holds beside the model")):
        if keys:
            raise _not_this_model(folder, f"it {problem} {', '.join(sorted(keys)[:3])}")
    for i, model in enumerate(models):
        model.load_state_dict(loaded[f"model{i}"])


def _load_translated(models: Sequence[Any], folder: Path) -> None:
    chunks = unwrap(models)
    architecture = chunks[0].architecture
    checkpoint = open_megatron(folder, architecture)
    # A model without a head can start from a language model; a classifier cannot.
    head = head_of(chunks[0].head_labels or None)
    wanted = table(architecture, padded_vocab_size=checkpoint.vocab_size, head=head)
    checkpoint.require(wanted)
    with torch.no_grad():
        zero_padding(chunks)
        for _, row, piece in mcore_pieces(chunks):
            corner = piece.global_offset[piece.prepend_axis_num :]
            rows, *columns = (
                slice(o, o + n) for o, n in zip(corner, piece.local_shape, strict=True)
            )
            # The checkpoint's vocabulary may be padded to another size than the model's.
            last = min(rows.stop, row.shape[0] - row.rearrangement.padding)
            if rows.start < last:
                values = checkpoint.read(row, (slice(rows.start, last), *columns))
                piece.data[: len(values)].copy_(values)


def _not_this_model(folder: Path, why: str) -> BadInput:
    return BadInput(
        f"{folder} does not hold exactly this model: {why}. Build the model from the config that "
        "belongs to the checkpoint."
    )
