"""The count of records that cannot be used, and when there are too many of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.energon import SkipSample
from megatron.energon.errors import SYSTEM_EXCEPTIONS
from megatron.energon.source_info import SourceInfo

from mcore_qwen3vl.data.places import sample_id
from mcore_qwen3vl.data.records.reading import OverlongSample, reason_of
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.unused.fields import Unused, sentences

log = logging.getLogger(__name__)

IF_TOO_LONG = "Raise --seq-length, lower the pixel budgets, or set --overlong truncate."

OVERLONG_IN_A_ROW = 1000
"""Consecutive over-long samples after which the run stops, since nothing seems to fit."""


class BadSampleGuard:
    """One worker's count of records that could not be used, each logged once.

    Over-long samples are left out by policy: they are counted separately, and stop the run only
    after :data:`OVERLONG_IN_A_ROW` of them.
    """

    def __init__(self, max_fraction: float, floor: int, *, counts_again: bool = False) -> None:
        """Start counting; `floor` and `counts_again` are fields of the config, which explains."""
        self._max_fraction = max_fraction
        self._floor = floor
        self._counts_again = counts_again
        self._records = floor
        self._bad: set[str] = set()
        self._named: set[Unused] = set()
        self._skipped = 0
        self._dropped = 0
        self._overlong_in_a_row = 0
        self._unusable_in_a_row = 0
        self._patience: int | None = None

    def expect_records(self, data_set: int, worker: int, patience: int | None = None) -> None:
        """Set about how many records the data set has, and how many of them a worker gets.

        A worker stops after `patience` unusable records in a row, if that is given: it reads on
        until it has a batch, and so might for ever.
        """
        # The share is of the worker's own records; if these are few, of the floor or of all.
        self._records = max(worker, min(data_set, self._floor))
        self._patience = patience

    def note_usable(self) -> None:
        """Note that a record can be used, down to its pixels."""
        self._unusable_in_a_row = 0

    def take_counts(self) -> tuple[int, int]:
        """Return the numbers of bad and over-long samples since the last call, for a batch."""
        taken = self._skipped, self._dropped
        self._skipped = self._dropped = 0
        return taken

    @contextmanager
    def skip_bad_samples(self, sample: Any, *, counted: bool = True) -> Iterator[None]:
        """Skip the sample if the code in the block raises anything but BadInput.

        Args:
            counted: False if another rank meets the same sample and counts it.

        Raises:
            SkipSample: the sample is skipped; energon then takes the next one.
            BadInput: the block raised it; or too many samples were bad, or too many in a row
                over-long.
        """
        try:
            yield
            self._overlong_in_a_row = 0
        except (SkipSample, BadInput, *SYSTEM_EXCEPTIONS):
            raise
        except OverlongSample as error:
            self._dropped += counted
            self._overlong_in_a_row += 1
            self._count_unusable(sample_id(sample), error)
            if counted:
                self._log_overlong(sample_id(sample), error)
            if self._overlong_in_a_row == OVERLONG_IN_A_ROW:
                raise BadInput(
                    f"The last {OVERLONG_IN_A_ROW} samples were all left out as over-long. The "
                    f"last one is {sample_id(sample)}: {error} {IF_TOO_LONG}"
                ) from error
            raise SkipSample from error
        except Exception as error:
            if counted:
                self._count_bad(sample_id(sample), error)
            raise SkipSample from error

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing that the block skips: whoever reads it in its turn counts it."""
        before = set(self._bad), self._skipped, self._dropped
        try:
            yield
        finally:
            self._bad, self._skipped, self._dropped = before

    def log_unused(self, name: str, unused: Iterable[Unused]) -> None:
        """Log what is not used of a sample of this name, each thing once."""
        new = [item for item in dict.fromkeys(unused) if item not in self._named]
        self._named.update(new)
        for sentence in sentences(new):
            log.warning("%s, the first in %s", sentence, name)

    def on_error(self, error: Exception, sample: Any, _: list[SourceInfo] | None) -> None:
        """Handle energon's own errors, such as a broken JSON line, before :meth:`skip_bad_samples`.

        BadInput is raised if too many samples were bad. The arguments are those that energon gives.
        """
        if isinstance(error, BadInput):  # raised by this guard, and passing through energon
            raise error
        self._count_bad(sample_id(sample), error)

    def _log_overlong(self, name: str, error: Exception) -> None:
        log.info("sample %s left out: %s", name, error)

    def _count_unusable(self, name: str, error: Exception) -> None:
        """Count a record that is bad or over-long; raise BadInput if there are no others."""
        self._unusable_in_a_row += 1
        if self._patience is not None and self._unusable_in_a_row > self._patience:
            raise BadInput(
                f"A data worker finds no record that it can use in its part of the data: the last "
                f"one is {name}: {reason_of(error)} `mcore-qwen3vl data check` lists what is wrong "
                "with each. If others can be used, lower --num-workers or the data-parallel size, "
                "so that each worker has some."
            ) from error

    def _count_bad(self, name: str, error: Exception) -> None:
        """Count and log a bad record, once in all epochs; raise BadInput if there are too many."""
        self._count_unusable(name, error)
        if name in self._bad:  # it was read in an earlier epoch
            self._skipped += self._counts_again
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


class Probe(BadSampleGuard):
    """A guard of records that are only tried: it counts and logs nothing, and keeps a reason."""

    def __init__(self) -> None:
        super().__init__(max_fraction=1, floor=0)
        self.first = ""
        """The name of the first record that could not be used, and the reason."""

    def log_unused(self, name: str, unused: Iterable[Unused]) -> None:
        pass

    def _log_overlong(self, name: str, error: Exception) -> None:
        pass

    def _count_unusable(self, name: str, error: Exception) -> None:
        advice = f" {IF_TOO_LONG}" * isinstance(error, OverlongSample)
        self.first = self.first or f"{name}: {reason_of(error)}{advice}"

    def _count_bad(self, name: str, error: Exception) -> None:
        self._count_unusable(name, error)


def unusable_error(path: Path, which: str, first: str) -> BadInput:
    """Return the error that no record of a data set can be used."""
    return BadInput(
        f"No record of {path} can be used: {which} were tried. The first is {first} "
        "`mcore-qwen3vl data check` lists what is wrong with each."
    )
