"""The guard that skips, counts and logs bad samples, and stops when there are too many."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.energon import SkipSample
from megatron.energon.errors import SYSTEM_EXCEPTIONS
from megatron.energon.source_info import SourceInfo, get_source_info

from mcore_qwen3vl.data.loading.index import line_of, origin
from mcore_qwen3vl.data.records.flaws import OverlongSample, reason_of
from mcore_qwen3vl.errors import BadInput

log = logging.getLogger(__name__)

OVERLONG_IN_A_ROW = 1000
"""Consecutive over-long samples after which the run stops, since nothing seems to fit."""


class BadSampleGuard:
    """One worker's count of records that could not be used, each counted and logged once.

    Over-long samples are left out by policy: they are counted separately, and stop the run only
    after :data:`OVERLONG_IN_A_ROW` of them.
    """

    def __init__(self, max_fraction: float, floor: int) -> None:
        """Start counting.

        Args:
            floor: smallest number of records from which the share is taken, for a worker that gets
                fewer; or the size of the whole data set, if that is smaller.
        """
        self._max_fraction = max_fraction
        self._floor = floor
        self._records = floor
        self._bad: set[str] = set()
        self._skipped = 0
        self._dropped = 0
        self._overlong_in_a_row = 0

    def expect(self, data_set: int, worker: int) -> None:
        """Set about how many records the data set has, and how many of them a worker gets."""
        self._records = max(worker, min(data_set, self._floor))

    def take(self) -> tuple[int, int]:
        """Return the numbers of bad and over-long samples since the last call, for a batch."""
        taken = self._skipped, self._dropped
        self._skipped = self._dropped = 0
        return taken

    @contextmanager
    def skipping(self, sample: Any, *, counted: bool = True) -> Iterator[None]:
        """Skip the sample if the code in the block raises anything.

        Args:
            counted: False if another rank meets the same sample and counts it.

        Raises:
            SkipSample: the sample is skipped; energon then takes the next one.
            BadInput: too many samples were bad, or too many in a row over-long.
        """
        try:
            yield
            self._overlong_in_a_row = 0
        except (SkipSample, *SYSTEM_EXCEPTIONS):
            raise
        except OverlongSample as error:
            self._dropped += counted
            self._overlong_in_a_row += 1
            if counted:
                log.info("sample %s left out: %s", sample_id(sample), error)
            if self._overlong_in_a_row == OVERLONG_IN_A_ROW:
                raise BadInput(
                    f"The last {OVERLONG_IN_A_ROW} samples were all left out as over-long. The "
                    f"last one is {sample_id(sample)}: {error} Raise --seq-length, lower the "
                    "pixel budgets, or set --overlong truncate."
                ) from error
            raise SkipSample from error
        except Exception as error:
            if counted:
                self._skip(sample_id(sample), error)
            raise SkipSample from error

    def on_error(self, error: Exception, sample: Any, _: list[SourceInfo] | None) -> None:
        """Handle energon's own errors, such as a broken JSON line, before :meth:`skipping`.

        Raises:
            BadInput: too many samples were bad.
        """
        if isinstance(error, BadInput):  # raised by this guard, and passing through energon
            raise error
        self._skip(sample_id(sample), error)

    def _skip(self, name: str, error: Exception) -> None:
        if name in self._bad:  # counted in an earlier epoch
            return
        self._bad.add(name)
        self._skipped += 1
        reason = reason_of(error)
        log.warning("bad sample %s skipped: %s", name, reason)
        if len(self._bad) > self._max_fraction * self._records:
            raise BadInput(
                f"{len(self._bad)} of about {self._records} records are bad, more than the "
                f"accepted share of {self._max_fraction:g} (--max-bad-fraction); the rest was not "
                f"read. The last one is {name}: {reason} Run "
                "`mcore-qwen3vl data check` on the data set, which lists what is wrong with each."
            )


@dataclass(frozen=True)
class Place:
    """The place of a record in its file."""

    file: Path
    number: int
    """The line of a JSONL file, or the record of another file, from 1."""

    @property
    def is_line(self) -> bool:
        """Whether `number` is a line, as an editor counts them."""
        return self.file.suffix == ".jsonl"

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.is_line else f"{self.file}[{self.number}]"


def place_of(source: SourceInfo) -> Place:
    """Return the place from which energon read a sample."""
    indexed = Path(str(source.dataset_path))
    dataset = origin(indexed)
    if dataset.suffix == ".jsonl":
        return Place(dataset, line_of(indexed, int(source.index)))
    file = dataset if source.shard_name == dataset.name else dataset / source.shard_name
    return Place(file, int(source.index) + 1)


def number_of(sample: Any) -> int:
    """Return the number, from 0, that a sample's record has in its file."""
    return int(get_source_info(sample)[0].index)


def sample_id(sample: Any) -> str:
    """Return where a sample comes from: ``file:line`` for JSONL, else ``file[record]``."""
    # energon passes the raw tuple of a joined sample, or a list of samples, to its error handler
    inner = getattr(sample, "data", sample)
    inner = inner[0] if isinstance(inner, list | tuple) and inner else inner
    sources = get_source_info(inner)
    if not sources:
        return str(inner["__key__"] if isinstance(inner, dict) else inner)[:200]
    return str(place_of(sources[0]))
