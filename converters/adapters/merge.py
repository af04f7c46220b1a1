"""Merge an adapter into its base checkpoint: W + s·B·A, a chunk at a time, on the offline engine.

Sums and products are computed in float32, as in PEFT's ``merge_and_unload``, and are rounded once
to the dtype that is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import (
    WEIGHTS,
    Adapter,
    Factors,
    Roles,
    factors_of_expert,
    read_adapter,
    row_chunks,
    scaled_product,
    unused_of_adapter,
)
from mcore_qwen3vl.converters.hf.config_file import Changes
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.identify import ADAPTER_CONFIG, PathKind, identify
from mcore_qwen3vl.converters.mapping.forms import INPUT_EMBEDDING, LM_HEAD, head_of
from mcore_qwen3vl.converters.mapping.table import Row, SourceTensor, table
from mcore_qwen3vl.converters.offline.engine import ConversionPlan, ConversionResult, plan_and_write
from mcore_qwen3vl.converters.offline.to_hf import (
    HFOptions,
    LayoutChoice,
    chosen_layout,
    lay_out,
    layout_notes,
    stream_copy,
)
from mcore_qwen3vl.converters.offline.to_mcore import open_huggingface, reading_notes
from mcore_qwen3vl.converters.storage.boxes import Selection
from mcore_qwen3vl.converters.storage.dtypes import cast, parse_dtype
from mcore_qwen3vl.errors import BadInput


class MergeOptions(HFOptions, total=False):
    """The options of `plan_merge` and of `engine.write`."""

    roles: Roles | None


def merge(
    base: str | Path, adapter: str | Path, dst: str | Path, **options: Unpack[MergeOptions]
) -> ConversionResult:
    """Write a Hugging Face checkpoint with an adapter merged into it.

    `plan_merge` and `engine.write` describe the arguments and the errors.
    """
    return plan_and_write(partial(plan_merge, base), adapter, dst, dict(options))


def plan_merge(
    base: str | Path,
    adapter: str | Path,
    *,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    expert_layout: LayoutChoice | None = None,
    roles: Roles | None = None,
) -> ConversionPlan:
    """Check a checkpoint and an adapter for it and plan their merge; write nothing.

    Args:
        dtype, max_shard_size, expert_layout: see `to_hf.plan_mcore_to_hf`. The default layout is
            "published" for MoE, since vLLM reads no other, and "source" for dense models. The one
            fused layout of Qwen3.5 is "v5", and vLLM reads it.
        roles: roles of the factors of fused experts; needed if their shapes do not tell.

    Raises:
        BadInput: `read_adapter` raised it, or the checkpoint is not complete.
    """
    base, adapter = Path(base), Path(adapter)
    wanted = parse_dtype(dtype)
    place = identify(base)
    if place.kind is PathKind.ADAPTER:
        raise BadInput(f"{base} is an adapter. Name the base checkpoint first, then the adapter.")
    place.require_huggingface()
    architecture = Architecture.from_hf(base)
    choice = expert_layout or ("published" if architecture.is_moe else "source")
    layout = chosen_layout(architecture, choice)
    checkpoint = open_huggingface(base, architecture)
    lora = read_adapter(adapter, base, roles=roles)
    if LM_HEAD in lora.factors or LM_HEAD in lora.saved:
        checkpoint.form.require_language_model(base)
    form = checkpoint.form.for_transformers
    if lora.labels:
        form = replace(form, head=replace(head_of(lora.labels), bias=form.head.bias))
    tied = architecture.tie_word_embeddings and form.head.is_language_model
    untied = tied and _makes_embeddings_differ(lora)
    merged = Merged(checkpoint, lora, architecture, swapped=layout == "published")
    written = replace(architecture, tie_word_embeddings=False) if untied else architecture
    plan = lay_out(
        "lora merge",
        base,
        table(written, expert_layout=layout, head=form.head, mtp=checkpoint.has_mtp),
        merged.stream,
        origin=merged.origin,
        hf_config=base,
        files=[*checkpoint.files, adapter / ADAPTER_CONFIG, adapter / WEIGHTS],
        changes=Changes(
            None if choice == "source" or choice == architecture.expert_layout else choice,
            wanted,
            untied,
            lora.labels,
        ),
        max_shard_size=max_shard_size,
        layout=layout,
        form=form,
        notes=(
            *reading_notes(checkpoint, wanted),
            *layout_notes(architecture, layout),
            *lora.notes,
            *lora.other_base_notes(base),
            *((_UNTIED,) if untied else ()),
        ),
    )
    return replace(plan, unused=tuple(unused_of_adapter(adapter, base)))


_UNTIED = (
    "The model ties its embedding and head, and the adapter makes them differ: they are written as "
    "two tensors, with tie_word_embeddings false, so that the merged model computes the same as "
    "the base with the adapter. PEFT's merge_and_unload keeps them tied."
)


def _makes_embeddings_differ(adapter: Adapter) -> bool:
    """Return whether the adapter makes the tied embedding and head of the base differ."""
    if LM_HEAD in adapter.factors:
        return True
    both = [adapter.saved[name] for name in (INPUT_EMBEDDING, LM_HEAD) if name in adapter.saved]
    return len(both) == 1 or (len(both) == 2 and not torch.equal(*both))


@dataclass(frozen=True)
class Merged:
    """The tensors of a checkpoint with an adapter merged into them.

    Attributes:
        architecture: that of `base`.
        swapped: whether fused experts are written as (E, in, out), the published layout.
    """

    base: HuggingFaceCheckpoint
    adapter: Adapter
    architecture: Architecture
    swapped: bool

    def origin(self, _: Row, named: SourceTensor) -> tuple[str, torch.dtype]:
        """Return the origin of a tensor; see `to_hf.lay_out`."""
        name = self._stored_name(named.name)
        if name not in self.base.entries:  # the head of a classifier whose base has none
            return "adapter", self.adapter.saved[name].dtype
        stored = "adapter" if named.name in self.adapter.saved else name
        update = " + B·A" if named.name in self.adapter.factors else ""
        return stored + update, self.base.entries[name].dtype

    def stream(self, row: Row, number: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield a merged HF piece; see `to_hf.Stream`."""
        named = row.sources[number]
        factors = self.adapter.factors.get(named.name)
        if factors is None and named.name not in self.adapter.saved:
            stored = replace(named, name=self._stored_name(named.name))
            swapped = self.swapped != (self.architecture.expert_layout == "published")
            row = replace(row, sources=(stored,))
            yield from stream_copy(self.base, row, 0, dtype, swapped=swapped)
        elif named.index is not None:
            expert = self._merge(named, (named.index,), factors)
            yield cast(expert.T if self.swapped else expert, dtype, named.name)
        else:
            for rows in row_chunks(*named.piece_shape[:2]):
                merged = self._merge(named, named.place((rows,)), factors)
                yield cast(merged, dtype, named.name)

    def _merge(self, named: SourceTensor, box: Selection, factors: Factors | None) -> Tensor:
        """Return `box`, rows of a tensor or one of its experts, (out, in), merged in float32."""
        if named.name in self.adapter.saved:
            weight = self.adapter.saved[named.name][box].float()
        else:
            weight = self.base.read_tensor(self._stored_name(named.name), box, torch.float32)
            if named.index is not None and self.architecture.expert_layout == "published":
                weight = weight.T
        if factors is None:
            return weight
        if named.index is not None:
            return scaled_product(*factors_of_expert(factors, named.index), factors.scaling).add_(
                weight
            )
        return scaled_product(factors.a, factors.b[box], factors.scaling).add_(weight)

    def _stored_name(self, name: str) -> str:
        tied = self.architecture.tie_word_embeddings and name == LM_HEAD
        return INPUT_EMBEDDING if tied else name
