"""Hugging Face to Hugging Face: another layout of experts, another dtype, other shards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.config_file import Changes
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.mapping.row import Row, max_rows
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.converters.mcore import formats
from mcore_qwen3vl.converters.offline.plan import ConversionPlan
from mcore_qwen3vl.converters.offline.to_hf import LayoutChoice, chosen_layout, lay_out
from mcore_qwen3vl.converters.offline.to_mcore import open_checkpoint, reading_notes
from mcore_qwen3vl.converters.storage.dtypes import parse_dtype


def plan_hf_to_hf(
    src: str | Path,
    *,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    expert_layout: LayoutChoice = "source",
) -> ConversionPlan:
    """Check a Hugging Face checkpoint and plan how to rewrite it; write nothing.

    Args:
        dtype, max_shard_size, expert_layout: see `to_hf.plan_mcore_to_hf`.

    Raises:
        BadInput: the input cannot be converted exactly with these options.
    """
    formats.require_huggingface(Path(src))
    source = formats.require_directory(src)
    wanted = parse_dtype(dtype)
    architecture = Architecture.from_hf(source)
    layout = chosen_layout(architecture, expert_layout)
    checkpoint = open_checkpoint(source, architecture)
    form = checkpoint.form if expert_layout == "source" else checkpoint.form.for_transformers

    return lay_out(
        "hf-to-hf",
        source,
        table(architecture, expert_layout=layout, head=form.head),
        partial(stream_copy, checkpoint, swapped=layout != architecture.expert_layout),
        origin=lambda _, named: (named.name, checkpoint.entries[named.name].dtype),
        hf_config=source,
        files=checkpoint.files,
        changes=Changes(None if expert_layout == "source" else expert_layout, wanted),
        max_shard_size=max_shard_size,
        layout=layout,
        names=form.names,
        notes=(*form.notes, *reading_notes(checkpoint, wanted), *layout_notes(layout)),
    )


def stream_copy(
    checkpoint: HuggingFaceCheckpoint, row: Row, number: int, dtype: torch.dtype, *, swapped: bool
) -> Iterator[Tensor]:
    """Yield HF piece `number` of `row` as `dtype`, read from the tensor of that name; see `Stream`.

    `swapped` says whether to swap the last two axes of fused experts.
    """
    source = row.sources[number]
    if source.index is not None:
        expert = checkpoint.read(source.name, (source.index,), dtype)
        yield expert.T if swapped else expert
        return
    step = max_rows(row, dtype)
    for first in range(0, source.shape[0], step):
        last = min(first + step, source.shape[0])
        yield checkpoint.read(source.name, (slice(first, last),), dtype)


def layout_notes(layout: str | None) -> tuple[str, ...]:
    """Return a note if vLLM cannot load experts of this layout."""
    if layout != "v5":
        return ()
    return (
        "vLLM loads fused experts only in the published layout, and this checkpoint has the layout "
        "of transformers 5.",
    )
