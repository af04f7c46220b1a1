"""The stages of a sample on its way through energon; each keeps energon's bookkeeping fields."""

from __future__ import annotations

from typing import Any

import torch
from megatron.energon import Sample, edataclass

from mcore_qwen3vl.data.encoding.pixels import Pixels
from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.loading.measured import Size, Unusable
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.teacher import Top


@edataclass
class RawSample(Sample):
    """A record as read, before it is parsed."""

    record: Any
    folder: MediaFolder
    source: int  # number of its data set


@edataclass
class PlannedRecord(Sample):
    """A tokenised record in the packing buffer; its media are measured but not decoded."""

    plans: list[Plan]  # one for each sequence
    source: int
    name: str
    reference: tuple[float, float] | None = None
    target: float | tuple[float, ...] | None = None
    label: bool | None = None


@edataclass
class MeasuredSample(Sample):
    """A sample that is not read yet: its number, and the size from which its work is computed."""

    data_set: int
    index: int
    size: Size | Unusable


@edataclass
class EncodedSample(Sample):
    """One sequence of a record, ready to be batched."""

    input_ids: torch.Tensor  # (T,) int64
    loss_weights: torch.Tensor  # (T,) float32: the weight of predicting each token
    pixels: Pixels
    name: str
    source: int = 0  # number of its data set
    teacher: Top | None = None  # at the trained tokens


@edataclass
class EncodedRecord(Sample):
    """A record that is ready to be batched."""

    sequences: list[EncodedSample]
    reference: tuple[float, float] | None
    target: float | tuple[float, ...] | None
    label: bool | None
