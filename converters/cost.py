"""The estimated cost of a conversion: bytes, memory and time, from a config alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.table import Row, hf_shapes, max_rows, table
from mcore_qwen3vl.converters.offline.engine import default_workers, group_units, unit_bytes
from mcore_qwen3vl.errors import BadInput

BASE_BYTES = 2**30
"""Bytes that the process may use besides its workers' slices."""


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a conversion in either direction.

    Attributes:
        pieces: rows of the mapping table: one layer of a tensor, one expert of one layer.
        units: number of units of work. A finished unit is journalled, so that a later run does not
            repeat it.
        nbytes: bytes of tensor data, read once and written once.
        largest_slice: mcore key of the piece with the most bytes in a worker at a time.
        largest_slice_bytes: the bytes of that piece that a worker holds at a time.
        memory_bound_bytes: 1 GiB plus one such slice for each worker, without the page cache.
        seconds: time to read and write everything at `disk_gb_per_s` (10^9 bytes); None if that is
            None.
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
    """Estimate the conversion of the model that a ``config.json``, or its directory, describes.

    Raises:
        BadInput: the config does not describe a Qwen3-VL model, or an option is not positive.
    """
    if (workers is not None and workers < 1) or not (disk_gb_per_s is None or disk_gb_per_s > 0):
        raise BadInput("--workers and --disk-gb-per-s must be positive.")
    architecture = Architecture.from_hf(config)
    rows = table(architecture, mtp=architecture.mtp_num_hidden_layers > 0)
    dtype = torch.float32 if architecture.dtype == "float32" else torch.bfloat16
    work = [(row, row.numel * dtype.itemsize) for row in rows]
    nbytes = sum(size for _, size in work)
    largest = max(rows, key=lambda row: slice_bytes(row, dtype))
    workers = workers or default_workers()
    return Estimate(
        model=architecture.kind,
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
    """Return the most bytes of one row that a worker holds at a time, in either direction."""
    height = min(max_rows(row, dtype), row.shape[0])
    if not row.rearrangement.in_order:  # read whole, for the checksums
        height = row.shape[0]
    return height * prod(row.shape[1:]) * dtype.itemsize
