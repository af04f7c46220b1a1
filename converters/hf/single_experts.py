"""Experts stored one by one, presented as fused tensors.

Quantised MoE checkpoints often hold ``experts.{e}.gate_proj.weight`` (I, H), ``up_proj`` (I, H) and
``down_proj`` (H, I) in place of the fused ``experts.gate_up_proj`` and ``experts.down_proj``. The
reader of Hugging Face checkpoints assembles the fused tensors on reading, a box at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.config import declared_expert_layout
from mcore_qwen3vl.converters.hf.shards import TensorHeader
from mcore_qwen3vl.converters.storage.boxes import Selection, explicit
from mcore_qwen3vl.errors import BadInput

NAME = re.compile(r"(.+\.mlp\.experts)\.(0|[1-9]\d{0,5})\.(?:gate_proj|up_proj|down_proj)\.weight")
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class SplitExperts:
    """How one fused tensor is stored.

    Attributes:
        parts: for each expert, the names of its matrices, stacked by rows.
        height: rows of each matrix.
        swapped: whether the fused tensor has each expert transposed (the published layout).
    """

    parts: tuple[tuple[str, ...], ...]
    shape: tuple[int, int, int]
    height: int
    swapped: bool

    def take(self, box: Selection, get: Callable[[str, Selection], Tensor]) -> Tensor:
        """Return `box` of the fused tensor; ``get(name, box)`` reads a box of one matrix."""
        expert, rows, columns = explicit(box, self.shape)
        if self.swapped:
            rows, columns = columns, rows
        if isinstance(expert, int):
            return self._one(expert, rows, columns, get)
        experts = range(expert.start, expert.stop)
        return torch.stack([self._one(e, rows, columns, get) for e in experts])

    def _one(
        self, expert: int, rows: slice, columns: slice, get: Callable[[str, Selection], Tensor]
    ) -> Tensor:
        pieces = []
        for number, name in enumerate(self.parts[expert]):
            above = number * self.height
            start, stop = max(rows.start - above, 0), min(rows.stop - above, self.height)
            if start < stop:
                pieces.append(get(name, (slice(start, stop), columns)))
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole.T if self.swapped else whole


def fuse(
    entries: Mapping[str, TensorHeader], config: dict[str, Any]
) -> tuple[dict[str, TensorHeader], dict[str, SplitExperts]]:
    """Return headers with fused tensors for experts stored one by one, and how those are stored.

    The ``config.json``, `config`, declares the layout of the fused tensors.

    Raises:
        BadInput: an expert is missing, or differs in shape or dtype from the others; experts are
            stored both one by one and fused; or the config contradicts itself.
    """
    found: dict[str, set[int]] = {}
    fused: dict[str, TensorHeader] = {}
    for name, entry in entries.items():
        if (named := NAME.fullmatch(name)) is not None:
            found.setdefault(named[1], set()).add(int(named[2]))
        else:
            fused[name] = entry
    split: dict[str, SplitExperts] = {}
    for prefix, experts in found.items():
        if missing := set(range(len(experts))) - experts:
            raise BadInput(
                f"the checkpoint stores {prefix} one by one and has {len(experts)} of them, but "
                f"lacks number {min(missing)}. Fetch the complete checkpoint."
            )
        for target, kinds in FUSED.items():
            name = f"{prefix}.{target}"
            if name in fused:
                raise BadInput(f"{prefix} are stored both one by one and fused, as {name}.")
            names = [[f"{prefix}.{e}.{kind}.weight" for kind in kinds] for e in range(len(experts))]
            first = _alike(names, entries)
            height, columns = first.shape
            rows = height * len(kinds)
            swapped = declared_expert_layout(config) == "published"
            shape = (len(experts), *((columns, rows) if swapped else (rows, columns)))
            split[name] = SplitExperts(tuple(map(tuple, names)), shape, height, swapped)
            fused[name] = replace(first, shape=shape, scale=None)
    return fused, split


def _alike(names: list[list[str]], entries: Mapping[str, TensorHeader]) -> TensorHeader:
    """Check that all tensors in `names` have the same shape and dtype; return the first header."""
    first: TensorHeader | None = None
    for name in (name for expert in names for name in expert):
        entry = entries.get(name)
        if entry is None:
            raise BadInput(
                f"the checkpoint stores its experts one by one, but {name} is missing. Fetch the "
                "complete checkpoint."
            )
        first = first or entry
        alike = (entry.shape, entry.stored) == (first.shape, first.stored)
        if not alike or len(entry.shape) != 2:
            raise BadInput(
                f"tensor {name} {list(entry.shape)} ({entry.stored}) is not like the same matrix "
                f"of other experts, {list(first.shape)} ({first.stored}). Fetch it again."
            )
    assert first is not None
    return first
