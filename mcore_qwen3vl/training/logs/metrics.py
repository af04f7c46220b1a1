"""Metrics that Megatron's log lacks: speed, data quality, balance, and MFU with vision."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.batch import Batch, Counts
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model import flops
from mcore_qwen3vl.runtime.gpus import GPUS

_LOGGER = logging.getLogger(__name__)


@dataclass
class Work:
    """The work that this rank received since the last report."""

    counts: Counts = field(default_factory=Counts)
    squared_lengths: float = 0.0
    squared_frames: float = 0.0

    def add(self, batch: Batch) -> None:
        """Add a micro-batch, whose tensors are on the host."""
        self.counts += batch.counts
        self.squared_lengths += float(_sample_lengths(batch).square().sum())
        if batch.visual is not None:
            self.squared_frames += float(batch.visual.frame_patches.double().square().sum())

    def vector(self) -> list[float]:
        """Return the counts in one list, to be summed over the data-parallel ranks."""
        c = self.counts
        data = (c.tokens, c.capacity, c.trained_tokens, c.images + c.videos, c.patches)
        return [
            *map(float, (*data, c.skipped, c.dropped)),
            self.squared_lengths,
            self.squared_frames,
        ]


def _sample_lengths(batch: Batch) -> Tensor:
    """Return (samples,) float64 lengths; when packed, with the padding between samples."""
    if batch.cu_seqlens is None:
        return (~batch.padding_mask).sum(1).double()
    padded = batch.cu_seqlens.diff().double()
    return padded[: batch.counts.samples]


class LeftOut:
    """Counts the records of a validation whose loss is not in its mean; all ranks use it alike."""

    def __init__(self) -> None:
        self._counts = Counts()

    def count(self, batch: Batch) -> None:
        """Count what was left out before one more micro-batch of this data-parallel rank."""
        self._counts += batch.counts

    def report(self, group: dist.ProcessGroup) -> dict[str, int]:
        """Return the numbers of this validation that are not 0, over all ranks.

        `group` has the data-parallel ranks, context parallelism not included.
        """
        counts = [self._counts.skipped, self._counts.dropped]
        total = torch.tensor(counts, dtype=torch.int64, device=torch.cuda.current_device())
        dist.all_reduce(total, group=group)
        self._counts = Counts()
        names = ("skipped samples", "over-long samples")
        return {name: n for name, n in zip(names, total.tolist(), strict=True) if n}


class Metrics:
    """Collects work and reports it at intervals; every rank makes the same calls.

    Args:
        peak_tflops: peak of one device in the training dtype; if None it is looked up, and there is
            no MFU for an unknown device.
        mtp: whether the MTP layer trains.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        peak_tflops: float | None = None,
        mtp: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._architecture, self._mtp = architecture, mtp
        self.trained = flops.ALL
        self._peak = peak_tflops or device_peak_tflops()
        self._clock = clock
        self._work = Work()
        self._since: float | None = None  # from the first batch on, not from the program's start

    def count(self, batch: Batch) -> None:
        """Count one more micro-batch of this data-parallel rank."""
        if self._since is None:
            self._since = self._clock()
        self._work.add(batch)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time that saving, exporting or validating takes."""
        started = self._clock()
        yield
        if self._since is not None:
            self._since += self._clock() - started

    @contextmanager
    def leave_out(self) -> Iterator[None]:
        """Leave out the work and the time of a step that trains nothing.

        What its data workers could not use still counts.
        """
        work = replace(self._work)
        with self.pause():
            yield
        taken, before = self._work.counts, work.counts
        unusable = Counts(
            skipped=taken.skipped - before.skipped, dropped=taken.dropped - before.dropped
        )
        self._work = replace(work, counts=before + unusable)

    def report(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return the numbers since the last report, over all ranks.

        At least one batch must have been counted since the start. `group` has the data-parallel
        ranks, context parallelism not included.
        """
        device = torch.cuda.current_device()
        total = torch.tensor(self._work.vector(), dtype=torch.float64, device=device)
        most = total[4:5].clone()  # this rank's patches, before `total` becomes that of all ranks
        dist.all_reduce(total, group=group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        now = self._clock()
        seconds = now - (self._since or 0.0)
        self._since, self._work = now, Work()
        *sums, busiest = torch.cat([total, most]).tolist()  # one host sync
        tokens, capacity, trained, media, patches, skipped, dropped, lengths, frames = sums
        work = tokens, lengths, patches, frames
        operations = flops.model(self._architecture, *work, self.trained, mtp=self._mtp)
        tflops = operations / seconds / dist.get_world_size() / 1e12
        report = {
            "tokens/s": tokens / seconds,
            "trained tokens/s": trained / seconds,
            "images/s": media / seconds,
            "patch imbalance": busiest * group.size() / patches if patches else 1.0,
            "packing efficiency": tokens / capacity if capacity else 0.0,
            "skipped samples": skipped,
            "over-long samples": dropped,
            "TFLOP/s/device": tflops,
        }
        if self._peak:
            report["MFU"] = tflops / self._peak
        return report


def device_peak_tflops() -> float | None:
    """Return the bf16 peak of this process's device in TFLOP/s; None for an unknown device."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower()
    return next((gpu.tflops for gpu in GPUS.values() if gpu.model in name), None)


def write_report(report: Mapping[str, float], iteration: int, tensorboard: Any, wandb: Any) -> None:
    """Write `report` to TensorBoard and W&B, if Megatron's flags opened them."""
    if tensorboard:
        for name, value in report.items():
            tensorboard.add_scalar(f"qwen3-vl/{name}", value, iteration)
    if wandb:
        wandb.log({f"qwen3-vl/{name}": value for name, value in report.items()}, iteration)


@contextmanager
def explain_tensorboard_errors(folder: str | None) -> Iterator[None]:
    """Raise BadInput if the disk refuses a write of TensorBoard; other errors pass through.

    Its thread writes the files, and passes the error on at the next number. So the thread's own
    traceback is not shown.
    """
    show = threading.excepthook

    def show_others(thrown: threading.ExceptHookArgs) -> None:
        if not _of_tensorboard(thrown.exc_value):
            show(thrown)

    threading.excepthook = show_others
    try:
        yield
    except OSError as error:
        if not _of_tensorboard(error):
            raise
        raise BadInput(
            f"TensorBoard's files in {folder} cannot be written: {error.strerror}. Make room, or "
            "name another --tensorboard-dir."
        ) from error
    finally:
        threading.excepthook = show


def _of_tensorboard(error: BaseException | None) -> bool:
    """Return whether the package tensorboard met this error while it wrote."""
    if not isinstance(error, OSError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return any("tensorboard" in Path(frame.filename).parts for frame in frames)


def known_losses(losses: Mapping[str, Tensor], totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the `losses` of a step that are a number; a step of unusable records has none.

    Megatron writes each given loss to TensorBoard, and adds it to `totals`. From `totals` it
    computes the means of its own log. A NaN loss is added here, so that the mean of the other steps
    is not taken for the mean of all steps; Megatron leaves such a mean out.
    """
    known = {name: loss for name, loss in losses.items() if not loss.isnan()}
    for name in losses.keys() - known.keys():
        totals[name] = totals[name] + losses[name] if name in totals else losses[name].reshape(1)
    return known


def append_json(file: str, numbers: Mapping[str, float | list[str] | None]) -> None:
    """Append `numbers`, or names, to `file` as one line of JSON, with every digit.

    JSON has no infinity and no NaN, for which null stands. A full disk does not end the run: the
    line is left out, with a warning.
    """
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in numbers.items()
    }
    line = f"{json.dumps(finite)}\n".encode()
    try:
        with open(file, "ab", buffering=0) as stream:
            end = stream.tell()
            if stream.write(line) < len(line):
                stream.truncate(end)  # a part of a line would make the file unreadable
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        _LOGGER.warning(
            "The line of step %s is not in %s: %s.",
            numbers.get("iteration"), file, error.strerror,
        )  # fmt: skip


def log_line(report: Mapping[str, float]) -> str:
    """Format `report` as one line of the log."""
    return " qwen3-vl | " + " | ".join(f"{name}: {value:.4g}" for name, value in report.items())
