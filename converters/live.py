"""A running, sharded model: loading a checkpoint into it, and the HF tensors of its parameters.

With LoRA, the factors of its adapters too.

:func:`load_weights` loads a checkpoint of either kind under any layout. The model's own
``sharded_state_dict()`` says which box of which checkpoint tensor each parameter holds; the table
says which boxes of Hugging Face tensors make it. So this module need not know how TP, PP, EP or ETP
cut a tensor, or how a layer spec names its parameters.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture, ExpertLayout
from mcore_qwen3vl.converters.formats import format_of, open_megatron
from mcore_qwen3vl.converters.hf.companions import read_form
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.identify import CheckpointPlace, PathKind, identify, resolve
from mcore_qwen3vl.converters.mapping import forms
from mcore_qwen3vl.converters.mapping.table import Row, table
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.boxes import Selection, Shape
from mcore_qwen3vl.errors import BadInput


def load_weights(models: Models, place: CheckpointPlace, *, spare_value_head: bool = False) -> None:
    """Fill the model chunks of this rank from a checkpoint of either kind, or from a hub id's.

    See :func:`load_checkpoint` and :func:`load_hf`, which this calls.
    """
    if place.kind is PathKind.HUB_ID:
        place = identify(resolve(place.path))
    if place.kind in (PathKind.HUGGINGFACE, PathKind.CONFIG):
        load_hf(models, place.path, spare_value_head=spare_value_head)
    else:  # an iteration, perhaps a half-written one
        load_checkpoint(models, place.path)


def load_hf(models: Models, path: str | Path, *, spare_value_head: bool = False) -> None:
    """Fill every parameter from a Hugging Face checkpoint; a rank reads only what it holds.

    Values are cast to the parameters' dtype. If the optimizer keeps float32 copies, call
    ``optimizer.reload_model_params()`` afterwards.

    Args:
        spare_value_head: leave the model's value head as it is if the checkpoint has none.

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
    spared = spare_value_head and stored.kind != forms.CLASSIFIER
    own_head = forms.head_of(chunks[0].head_labels)
    headless = own_head.kind == forms.HEADLESS  # a head that is stored is not read
    head = stored if spared or headless or stored.kind == forms.TIED_COPY else None
    checkpoint.require(table_of(chunks, layout, head=head, mtp=checkpoint.has_mtp))
    chunks[0].architecture.require_settings_of(path)
    with torch.no_grad():
        zero_padding(chunks)
        for part in hf_parts(chunks, expert_layout=layout):
            if not (spared and part.name == forms.SCORE):
                part.local.copy_(checkpoint.read_tensor(part.name, part.box, part.local.dtype))


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
    if (format := format_of(place)).one_layout:
        raise BadInput(
            f"{folder} is of {format.title}, which loads only under its own layout. Export it "
            "first: mcore-qwen3vl convert mcore-to-hf."
        )
    checkpoint = open_megatron(place, architecture)
    head = forms.head_of(labels)
    rows = table(
        architecture,
        padded_vocab_size=checkpoint.vocab_size,
        head=head,
        mtp=checkpoint.has_mtp or chunks[0].has_mtp,
    )
    unread = ("output_layer.weight",) if head.kind == forms.HEADLESS else ()
    checkpoint.require(rows, unread=unread)
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


ADAPTER = "adapter."
"""Prefix of the names of adapters' factors in a chunk's ``named_parameters()``."""

Models = nn.Module | Sequence[nn.Module]
"""A model, or its virtual pipeline chunks; wrappers (DDP, ``Float16Module``) are removed."""

Values = Callable[[nn.Parameter], Tensor | None]
"""Returns a tensor of a parameter's shape, such as its gradient; None leaves the parameter out."""


@dataclass(frozen=True)
class Overlap:
    """The overlap of a local tensor and one Hugging Face tensor.

    Attributes:
        box: place in the whole HF tensor: a slice for each axis; for one expert of a fused tensor,
            the expert's number and a slice for each other axis.
        local: the overlapping part of the local tensor, a view of it in HF's orientation.
        main: whether this rank holds the main replica; other ranks may hold copies.
    """

    name: str
    box: Selection
    local: Tensor
    main: bool
    parameter: str

    @property
    def label(self) -> str:
        """The HF name, followed by the expert's number for one expert of a fused tensor."""
        first = self.box[0]
        return f"{self.name}[{first}]" if isinstance(first, int) else self.name

    @property
    def expert(self) -> int:
        """The number of the expert."""
        first = self.box[0]
        if not isinstance(first, int):
            raise ValueError(f"{self.name} is no tensor of fused experts")
        return first

    @property
    def rows_and_columns(self) -> tuple[slice, slice]:
        """Rows and columns of the box; for fused experts, in the expert's matrix."""
        rows, columns = (side for side in self.box[-2:] if isinstance(side, slice))
        return rows, columns


def weight(parameter: nn.Parameter) -> Tensor:
    """Return the parameter's own values."""
    return parameter.data


def gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the ``main_grad`` of Megatron's DDP, or else ``grad``; None for a frozen parameter."""
    if not parameter.requires_grad:
        return None
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def hf_parts(
    models: Models, values: Values = weight, *, expert_layout: ExpertLayout | None = None
) -> Iterator[Overlap]:
    """Yield every local parameter, cut into parts of Hugging Face tensors.

    Adapters are left out.

    Args:
        expert_layout: layout of the fused experts on the HF side; default: the layout that the
            model's config declares.

    Raises:
        BadInput: the table does not know a parameter, or has another shape for it.
    """
    for name, row, piece in mcore_pieces(models, values, expert_layout=expert_layout):
        yield from _parts_of_piece(row, piece, name)


def mcore_pieces(
    models: Models, values: Values = weight, *, expert_layout: ExpertLayout | None = None
) -> Iterator[tuple[str, Row, ShardedTensor]]:
    """Yield the name of every local parameter with each box of a checkpoint tensor that it fills.

    The box is in one row of the table, and its ``data`` is a view of the parameter's tensor.
    `hf_parts` describes the arguments and the error.
    """
    chunks = unwrap(models)
    rows = {(row.key, row.offset): row for row in table_of(chunks, expert_layout)}
    for chunk in chunks:
        parameters = dict(chunk.named_parameters(remove_duplicate=False))
        for name, entry in chunk.sharded_state_dict().items():
            if name not in parameters or name.startswith(ADAPTER):
                continue  # _extra_state, or an adapter, which is not part of the base model
            tensor = values(parameters[name])
            for piece in _sharded_pieces(entry, tensor) if tensor is not None else ():
                yield name, _require_row(rows, name, piece), piece


def table_of(
    chunks: Sequence[Any],
    expert_layout: ExpertLayout | None = None,
    *,
    head: forms.HeadForm | None = None,
    mtp: bool = False,
) -> list[Row]:
    """Return the table of a running model, with its padded vocabulary and, by default, its head.

    `mtp` is as in `table`: a checkpoint may have layers that the model has not. Those that the
    model has are always in it.
    """
    model = chunks[0]
    return table(
        model.architecture,
        expert_layout=expert_layout,
        padded_vocab_size=model.vocab_size,
        head=head or forms.head_of(model.head_labels),
        mtp=mtp or model.has_mtp,
    )


def unwrap(models: Models) -> list[Any]:
    """Return the chunks inside Megatron's wrappers (DDP, ``Float16Module``)."""
    chunks: list[Any] = [models] if isinstance(models, nn.Module) else list(models)
    while any(hasattr(chunk, "module") for chunk in chunks):
        chunks = [getattr(chunk, "module", chunk) for chunk in chunks]
    return chunks


def check_replicas(models: Any) -> None:
    """Compare the bits of all copies of every parameter; a collective of all ranks.

    Raises:
        BadInput: copies differ; the message gives the number of such tensors and the first names.
            Raised on every rank.
    """
    checksums = {
        (part.name, str(part.box)): xxhash.xxh3_128_hexdigest(as_bytes(part.local.cpu()))
        for part in hf_parts(unwrap(models))
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, checksums)
    sums_of: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for rank_checksums in ranks:
        for place, checksum in rank_checksums.items():
            sums_of[place].add(checksum)
    differing = list(dict.fromkeys(name for (name, _), sums in sums_of.items() if len(sums) > 1))
    if differing:
        names = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
        raise BadInput(
            f"The ranks hold different values of {len(differing)} tensors that should be the "
            f"same on all of them ({names}), so there is no one model to write. Load the "
            "checkpoint again, call reduce_gradients before each optimizer step, and give all "
            "ranks the same learning rate."
        )


def factor_parts(models: Models, values: Values = weight) -> Iterator[Overlap]:
    """Yield every local factor, cut into parts of PEFT's tensors.

    Yields:
        Parts, each with the Hugging Face parameter and the factor as its `name`, as in
        ``model.language_model.layers.0.self_attn.q_proj.weight.lora_A``. The box of a part refers
        to PEFT's tensor: for experts (E * r, in) or (out, r * E).
    """
    for chunk in unwrap(models):
        if chunk.adapter is None:
            continue
        entries = chunk.adapter.sharded_state_dict(ADAPTER)
        for path, pair in chunk.adapter.pairs():
            for factor in pair.places:
                name = f"{ADAPTER}{path}.{factor}"
                tensor = values(getattr(pair, factor))
                if tensor is None or name not in entries:
                    continue
                main = is_main_replica(entries[name].replica_id)
                for box, local in pair.parts(factor, tensor):
                    yield Overlap(f"{pair.name}.{factor}", box, local, main, name)


@torch.no_grad()
def load_factors(models: Models, factors: Mapping[str, Any]) -> None:
    """Fill every factor that this rank holds, by Hugging Face parameter, cast to its dtype.

    Their ``a`` and ``b`` have PEFT's shapes.
    """
    for part in factor_parts(models):
        name, _, factor = part.name.rpartition(".")
        factor_values: Tensor = factors[name].a if factor == "lora_A" else factors[name].b
        part.local.copy_(factor_values[part.box])


@torch.no_grad()
def initialize_factors(models: Models, seed: int) -> None:
    """Initialise as PEFT does: A uniform within 1 / sqrt(in) of zero, B zero.

    The values are the same under every layout.
    """
    shapes: dict[str, Shape] = {
        f"{pair.name}.{factor}": pair.whole_shape(factor)
        for chunk in unwrap(models)
        if chunk.adapter is not None
        for _, pair in chunk.adapter.pairs()
        for factor in pair.places
    }
    by_name: dict[str, list[Overlap]] = {}
    for part in factor_parts(models):
        by_name.setdefault(part.name, []).append(part)
    for name, parts in by_name.items():
        values = torch.zeros(()).expand(shapes[name])
        if name.endswith("lora_A"):
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            bound = shapes[name][1] ** -0.5
            values = torch.empty(shapes[name], dtype=torch.float32)
            values.uniform_(-bound, bound, generator=generator)
        for part in parts:
            part.local.copy_(values[part.box])


def _require_row(
    rows: Mapping[tuple[str, Shape], Row], parameter: str, piece: ShardedTensor
) -> Row:
    """Return the table's row of a piece; raise BadInput if there is none, or of another shape."""
    # The axes that Megatron puts before the parameter's own are those of layers and experts.
    stacked = piece.global_offset[: piece.prepend_axis_num]
    row = rows.get((piece.key, tuple(stacked)))
    if row is None:
        raise BadInput(
            f"Parameter {parameter} ({piece.key}) does not belong to the model's checkpoint. "
            "Remove added parameters first."
        )
    if row.global_shape != tuple(piece.global_shape):
        raise BadInput(
            f"Parameter {parameter} ({piece.key}) has the global shape "
            f"{list(piece.global_shape)}, but the Hugging Face model makes it "
            f"{list(row.global_shape)}. The model was built from another config."
        )
    return row


def _sharded_pieces(entry: Any, tensor: Tensor) -> Iterator[ShardedTensor]:
    """Yield the boxes of checkpoint tensors that `tensor` fills: one, or two for a gated linear.

    mcore derives the sharding of optimizer states from that of their parameters in the same way.
    """
    if isinstance(entry, ShardedTensorFactory):
        yield from replace(entry, data=tensor).build()
    else:
        yield replace(entry, data=tensor, dtype=tensor.dtype)


def _parts_of_piece(row: Row, piece: ShardedTensor, parameter: str) -> Iterator[Overlap]:
    """Yield the parts of Hugging Face tensors that make a box of a row's piece."""
    start, *others = piece.global_offset[piece.prepend_axis_num :]
    length, *widths = piece.local_shape
    columns = tuple(slice(o, o + n) for o, n in zip(others, widths, strict=True))
    how, at = row.rearrangement, 0
    for source, first, last in how.spans(start, start + length):
        local = piece.data[at : at + last - first]
        at += last - first
        rows = slice(first, last)
        box: Selection = (*columns, rows) if how.transposed else (rows, *columns)
        named = row.sources[source]
        yield Overlap(
            name=named.name,
            box=named.place(box),
            local=local.T if how.transposed else local,
            main=is_main_replica(piece.replica_id),
            parameter=parameter,
        )
