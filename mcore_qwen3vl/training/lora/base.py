"""The base weights of an adapter: read at every start, and compared when a run resumes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.converters.live.sharded import hf_parts
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

FILE = "base.json"

_INTEGERS = {2: torch.int16, 4: torch.int32}


class Identity(TypedDict):
    """Identifies base weights by the sum of their bits, which is the same under every layout."""

    path: str
    dtype: str
    sum: int


class Base:
    """The weights that a LoRA run leaves as they are: --load-hf or --pretrained-checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.path: str | None = args.load_hf or args.pretrained_checkpoint
        self._hf = bool(args.load_hf)
        self._sum: Tensor | None = None
        self._dtype = ""
        self._total: int | None = None

    def load(self, chunk: Qwen3VLModel) -> None:
        """Fill one pipeline chunk, which has no adapter yet; for Megatron's formats a collective.

        Raises:
            BadInput: the checkpoint cannot be read or is of another model.
        """
        if self.path is None:
            return
        if self._hf:
            from mcore_qwen3vl.converters.hf.hub import resolve
            from mcore_qwen3vl.converters.live.load import load_hf

            load_hf(chunk, resolve(self.path), spare_value_head=bool(chunk.head_labels))
        else:
            from mcore_qwen3vl.converters.live.load import load_checkpoint

            load_checkpoint([chunk], self.path, whole=False)
        self._add(chunk)

    def identity(self) -> Identity | None:
        """Return what identifies these weights, or None if none were read; a collective."""
        if self.path is None or self._sum is None:
            return None
        if self._total is None:
            dist.all_reduce(self._sum)
            self._total = int(self._sum)
        return Identity(path=str(self.path), dtype=self._dtype, sum=self._total)

    def check(self, folder: Path) -> None:
        """Compare with the base that the checkpoints beside `folder` were trained on; a collective.

        Raises:
            BadInput: the base weights differ.
        """
        mine, file = self.identity(), folder / FILE
        if mine is None or not file.is_file():
            return
        theirs: Identity = json.loads(file.read_text(encoding="utf-8"))
        if theirs["dtype"] == mine["dtype"] and theirs["sum"] != mine["sum"]:
            raise BadInput(
                f"{folder.parent} was trained with the base weights of {theirs['path']}, and "
                f"{mine['path']} has others: give the same base, or choose another --save."
            )

    @torch.no_grad()
    def _add(self, chunk: Qwen3VLModel) -> None:
        """Add up the bits of this rank's share as integers, so that the order does not matter."""
        weights = next(chunk.parameters())
        if self._sum is None:
            self._sum = torch.zeros((), dtype=torch.int64, device=weights.device)
            self._dtype = dtype_name(weights.dtype)
        for part in hf_parts(chunk):
            if part.main:
                bits = part.local.view(_INTEGERS[part.local.element_size()])
                self._sum += bits.sum(dtype=torch.int64)


def save_identity(folder: Path, identity: Identity) -> None:
    """Write `identity` beside the adapter's config; one rank calls this."""
    (folder / FILE).write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
