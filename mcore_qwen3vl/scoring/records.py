"""Micro-batches from records of data sets, which are read, planned and packed block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.batch import Batch, Batcher
from mcore_qwen3vl.data.encoding.packing import best_fit
from mcore_qwen3vl.data.encoding.preparation import Plan, Preparation, spare_plan
from mcore_qwen3vl.data.loading.datasets import CrudeSamples
from mcore_qwen3vl.data.loading.index import Place, place_of
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.processor import require_fitting
from mcore_qwen3vl.data.records.reading import BadSample, OverlongSample, reason_of
from mcore_qwen3vl.data.scores import digest
from mcore_qwen3vl.scoring.output import OVERLONG
from mcore_qwen3vl.unused import Unused


@dataclass(frozen=True)
class Planned:
    """One sequence of a record, tokenised."""

    record: int
    side: str  # its name among the record's, such as chosen or query; empty if it is alone
    plan: Plan
    source: int  # number of its data set


@dataclass
class BlockResults:
    """The results for a block of records, from one rank or several."""

    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Log-probabilities and other results of each sequence, by its name."""
    errors: dict[int, str] = field(default_factory=dict)
    """The reasons why records cannot be scored, by the record's number."""
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    """By the record's number, hashes of the tokens of its sequences, by their sides, in order."""
    unused: dict[Unused, None] = field(default_factory=dict)
    """What is not used of the records, in order."""
    places: dict[int, Place] = field(default_factory=dict)
    """The records' places in their files, by the record's number."""

    def __or__(self, other: BlockResults) -> BlockResults:
        return BlockResults(
            *(getattr(self, f.name) | getattr(other, f.name) for f in fields(BlockResults))
        )

    def entry(self, record: int) -> dict[str, Any]:
        """Return what is written for a record, besides its place."""
        if record in self.errors:
            return {"error": self.errors[record]}
        sides = {
            side: {**self.scores[_name(record, side)], "digest": digest}
            for side, digest in self.digests[record].items()
        }
        return sides.get("") or sides


def _name(record: int, side: str) -> str:
    """Return the name of a sequence in its batch."""
    return f"{record} {side}"


class Records:
    """A reader that encodes records as training does.

    Args:
        config: settings, with `packing` or one sequence a row; the budgets are set on `processor`.
        width_multiple: the number that the length of a batch must be a multiple of.
        alone: whether a record of several sequences is bad.
    """

    def __init__(
        self,
        samples: CrudeSamples,
        sources: Sequence[Source],
        architecture: Architecture,
        processor: Any,
        config: DataConfig,
        width_multiple: int,
        *,
        alone: bool = False,
    ) -> None:
        require_fitting(processor, architecture)
        self._samples = samples
        self._architecture, self._config = architecture, config
        self._multiple, self._alone = width_multiple, alone
        self._preparation = Preparation(processor, config, sources)
        self._pad_id = processor.tokenizer.pad_token_id
        self._results = BlockResults()

    def take_results(self) -> BlockResults:
        """Return the results, except scores, for the records that were read since the last call."""
        results, self._results = self._results, BlockResults()
        return results

    def plan(self, records: Sequence[int]) -> list[list[Planned]]:
        """Choose which sequences of `records` share a micro-batch."""
        planned = [
            planned_sequence for record in records for planned_sequence in self._plan(record)
        ]
        if not self._config.packing:
            return [[planned_sequence] for planned_sequence in planned]
        lengths = [
            self._config.padded(len(planned_sequence.plan.input_ids))
            for planned_sequence in planned
        ]
        packs = best_fit(lengths, self._config.seq_length)
        return [[planned[i] for i in pack] for pack in packs]

    def batches(self, micros: Sequence[Sequence[Planned]], count: int) -> Iterator[Batch]:
        """Yield the micro-batches with their pixels, then empty ones up to `count` in all."""
        for micro in [*micros, *[()] * (count - len(micros))]:
            yield self._batch(micro)

    def _plan(self, record: int) -> list[Planned]:
        """Tokenise the sequences of a record; return none if the record cannot be used."""
        crude = self._samples[record]
        self._results.places[record] = place_of(crude["__sources__"][0])
        try:
            raw = self._preparation.raw(crude)
            plans = self._preparation.plan_each(raw, task=self._config.task)
            if self._alone and len(plans) > 1:
                raise BadSample("--top-k is for records of one sequence; it has several.")
        except OverlongSample as error:
            self._results.errors[record] = f"{OVERLONG}{error}"
            return []
        except Exception as error:  # as in the loader, any exception makes the record bad
            self._results.errors[record] = reason_of(error)
            return []
        left = (item for plan in plans.values() for item in plan.unused)
        self._results.unused |= dict.fromkeys(left)
        self._results.digests[record] = {
            side: digest(plan.input_ids) for side, plan in plans.items()
        }
        return [Planned(record, side, plan, raw.source) for side, plan in plans.items()]

    def _batch(self, micro: Sequence[Planned]) -> Batch:
        named = {
            _name(sequence.record, sequence.side): plan
            for sequence in micro
            if (plan := self._decode(sequence))
        }
        # A rank may have no records left while others have.
        named = named or {"": spare_plan(self._pad_id)}
        lengths = [self._config.padded(len(plan.input_ids)) for plan in named.values()]
        width = -(-sum(lengths) // self._multiple) * self._multiple
        batcher = Batcher(
            self._architecture,
            replace(self._config, seq_length=width),
            self._pad_id,
            self._preparation.scale,
        )
        assemble = batcher.pack if self._config.packing else batcher.pad
        return assemble(list(named.values()), list(named))

    def _decode(self, sequence: Planned) -> Plan | None:
        try:
            return replace(
                sequence.plan, pixels=self._preparation.pixels(sequence.plan, sequence.source)
            )
        except Exception as error:
            self._results.errors[sequence.record] = reason_of(error)
            return None
