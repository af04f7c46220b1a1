"""Skip bad samples, count them, name them in the log, and stop when there are too many."""

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

from mcore_qwen3vl.data.loading.lines import line_of
from mcore_qwen3vl.data.loading.stand_in import origin
from mcore_qwen3vl.data.records.flaws import BadSample, OverlongSample
from mcore_qwen3vl.errors import BadInput

log = logging.getLogger(__name__)

OVERLONG_IN_A_ROW = 1000
"""So many over-long samples without one that fits are no policy any more: nothing would train."""


class BadSampleGuard:
    """One worker's tally of records that could not be used, each counted and logged once.

    Over-long samples are left out by policy: they are tallied apart, and stop the run only when
    nothing else comes.
    """

    def __init__(self, max_fraction: float, floor: int) -> None:
        """
        Args:
            max_fraction: of the records that may be bad.
            floor: a worker that is dealt fewer records than this may find as many bad ones as if it
                had this many, or the whole data set if that is smaller.
        """
        self._max_fraction = max_fraction
        self._floor = floor
        self._records = floor
        self._bad: set[str] = set()
        self._skipped = 0
        self._dropped = 0
        self._overlong_in_a_row = 0

    def expect(self, data_set: int, worker: int) -> None:
        """Say how many records the data set has, about, and how many of them a worker is dealt."""
        self._records = max(worker, min(data_set, self._floor))

    def take(self) -> tuple[int, int]:
        """Bad and over-long samples since the last call: a batch reports those on its way."""
        taken = self._skipped, self._dropped
        self._skipped = self._dropped = 0
        return taken

    @contextmanager
    def skipping(self, sample: Any, *, counted: bool = True) -> Iterator[None]:
        """Turn whatever goes wrong inside into a skipped sample.

        Args:
            sample: for messages.
            counted: not, where another rank meets the same sample and counts it.

        Raises:
            SkipSample: for energon, which then takes the next sample.
            BadInput: too many samples were bad, or all of the last ones over-long.
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
        """Energon's error handler: what fails before :meth:`skipping`, such as a broken JSON line.

        Raises:
            BadInput: too many samples were bad.
        """
        if isinstance(error, BadInput):  # our own stop, on its way through energon
            raise error
        self._skip(sample_id(sample), error)

    def _skip(self, name: str, error: Exception) -> None:
        if name in self._bad:  # of an earlier epoch
            return
        self._bad.add(name)
        self._skipped += 1
        kind = "" if isinstance(error, BadSample | BadInput) else f"{type(error).__name__}: "
        log.warning("bad sample %s skipped: %s%s", name, kind, error)
        if len(self._bad) > self._max_fraction * self._records:
            raise BadInput(
                f"{len(self._bad)} of about {self._records} records are bad, more than the "
                f"accepted share of {self._max_fraction:g} (--max-bad-fraction), and a data worker "
                f"has not read all of them yet. The last one is {name}: {kind}{error} Run "
                "`mcore-qwen3vl data check` on the data set, which lists what is wrong with each."
            )


@dataclass(frozen=True)
class Place:
    """Where a record is."""

    file: Path
    number: int
    """From 1: the line of a JSONL file, or the record of another file."""

    @property
    def is_line(self) -> bool:
        """Whether it counts lines, as an editor does."""
        return self.file.suffix == ".jsonl"

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.is_line else f"{self.file}[{self.number}]"


def place_of(source: SourceInfo) -> Place:
    """Where energon has found a sample."""
    indexed = Path(str(source.dataset_path))
    dataset = origin(indexed)
    if dataset.suffix == ".jsonl":
        return Place(dataset, line_of(indexed, int(source.index)))
    file = dataset if source.shard_name == dataset.name else dataset / source.shard_name
    return Place(file, int(source.index) + 1)


def sample_id(sample: Any) -> str:
    """Where a sample came from: the line of a JSONL file, or the record of another file in
    brackets."""
    # energon hands its error handler the raw tuple of a joined sample, or a list of samples
    inner = getattr(sample, "data", sample)
    inner = inner[0] if isinstance(inner, list | tuple) and inner else inner
    sources = get_source_info(inner)
    if not sources:
        return str(inner["__key__"] if isinstance(inner, dict) else inner)[:200]
    return str(place_of(sources[0]))
