"""What a conversion will take, from a config alone: no weights are read, none need be there."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.row import Row, max_rows
from mcore_qwen3vl.converters.mapping.table import hf_shapes, table
from mcore_qwen3vl.converters.offline.engine import default_workers
from mcore_qwen3vl.converters.offline.plan import group_units, unit_bytes
from mcore_qwen3vl.errors import BadInput

BASE_BYTES = 2**30
"""What the process may take besides the slices its workers hold."""


@dataclass(frozen=True)
class Estimate:
    """A conversion in either direction, on paper.

    Attributes:
        pieces: rows of the mapping table: one layer of a tensor, one expert of one layer.
        units: work that is noted when finished, so that a later run does not repeat it.
        nbytes: bytes of tensor data, read once and written once.
        largest_slice: the piece of which a worker holds most at a time.
        largest_slice_bytes: how much that is.
        memory_bound_bytes: 1 GiB and one such slice for each worker; the page cache apart.
        seconds: reading and writing everything at `disk_gb_per_s` (10^9 bytes); None without it.
    """

    model: str
    dtype: str
    tensors: int
    pieces: int
    units: int
    nbytes: int
    largest_slice: str
    largest_slice_bytes: int
    workers: int
    memory_bound_bytes: int
    disk_gb_per_s: float | None
    seconds: float | None


def estimate(
    config: str | Path, *, workers: int | None = None, disk_gb_per_s: float | None = None
) -> Estimate:
    """Lay out the conversion of the model that a ``config.json``, or its directory, describes.

    Raises:
        BadInput: the config is not one of Qwen3-VL, or an option is no positive number.
    """
    if (workers is not None and workers < 1) or not (disk_gb_per_s is None or disk_gb_per_s > 0):
        raise BadInput("--workers and --disk-gb-per-s must be positive.")
    architecture = Architecture.from_hf(config)
    rows = table(architecture)
    dtype = torch.float32 if architecture.dtype == "float32" else torch.bfloat16
    work = [(row, row.numel * dtype.itemsize) for row in rows]
    nbytes = sum(size for _, size in work)
    largest = max(rows, key=lambda row: slice_bytes(row, dtype))
    workers = workers or default_workers()
    return Estimate(
        model=f"Qwen3-VL {'MoE' if architecture.is_moe else 'dense'}",
        dtype=architecture.dtype,
        tensors=len(hf_shapes(rows)),
        pieces=len(rows),
        units=sum(1 for _ in group_units(work, unit_bytes(nbytes), str)),
        nbytes=nbytes,
        largest_slice=largest.key,
        largest_slice_bytes=slice_bytes(largest, dtype),
        workers=workers,
        memory_bound_bytes=BASE_BYTES + workers * slice_bytes(largest, dtype),
        disk_gb_per_s=disk_gb_per_s,
        seconds=None if disk_gb_per_s is None else 2 * nbytes / 1e9 / disk_gb_per_s,
    )


def slice_bytes(row: Row, dtype: torch.dtype) -> int:
    """The most of one row that is in a worker's hands at a time, in either direction."""
    whole = row.shape[0]
    height = whole if row.rearrangement.transposed else min(max_rows(row, dtype), whole)
    return height * prod(row.shape[1:]) * dtype.itemsize
