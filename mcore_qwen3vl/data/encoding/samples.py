"""The stages of a sample on its way through energon; each keeps energon's bookkeeping fields."""

from __future__ import annotations

from typing import Any

import torch
from megatron.energon import Sample, edataclass

from mcore_qwen3vl.data.encoding.pixels import Pixels
from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.loading.measured import Size, Unusable
from mcore_qwen3vl.data.records.media import MediaFolder


@edataclass
class RawSample(Sample):
    """A record as it was read."""

    record: Any
    folder: MediaFolder
    source: int  # number of its data set


@edataclass
class PlannedSample(Sample):
    """Tokenised; its media are measured but not decoded. Waits in the packing buffer."""

    plan: Plan
    source: int
    name: str


@edataclass
class MeasuredSample(Sample):
    """Not read yet: its number, and what its work is computed from."""

    data_set: int
    index: int
    size: Size | Unusable


@edataclass
class EncodedSample(Sample):
    """Ready to be batched."""

    input_ids: torch.Tensor  # (T,) int64
    loss_weights: torch.Tensor  # (T,) float32, of the token itself
    pixels: Pixels
    name: str
