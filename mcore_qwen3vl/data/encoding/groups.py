"""Energon's pipeline for records of several sequences, which are always in one micro-batch.

A batch holds the sequences of one record after the other: chosen and rejected of a preference
record; query, positive and negatives of a retrieval record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from megatron.energon import stateless

from mcore_qwen3vl.data.config import DataConfig, Task
from mcore_qwen3vl.data.encoding.batch import Batch, without_pixels
from mcore_qwen3vl.data.encoding.encoder import Qwen3VLTaskEncoder
from mcore_qwen3vl.data.encoding.planning import Plan, check_length
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.data.encoding.samples import (
    EncodedRecord,
    EncodedSample,
    PlannedRecord,
    RawSample,
)
from mcore_qwen3vl.data.loading.bad_samples import number_of
from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.parsed import Conversation
from mcore_qwen3vl.data.records.preference import SIDES
from mcore_qwen3vl.data.records.retrieval import POSITIVE, QUERY

_NEEDED: dict[Task | None, tuple[str, ...]] = {
    "embedding": (QUERY, POSITIVE),
    "reranker": (POSITIVE,),  # in its prompt is the query
    "reward": SIDES,
    "classify": ("",),
}
"""By task, the sequences that a record needs."""


def plan_each(
    preparation: Preparation, sample: RawSample, *, task: Task | Literal["pairs"] | None = None
) -> dict[str, Plan]:
    """Tokenise the sequences of a raw record, by their names in :meth:`Preparation.parse_each`.

    Raises:
        BadSample, OverlongSample: the record cannot be used. Each sequence must fit by itself;
            whether they fit together is not checked.
    """
    parts = preparation.parse_each(sample, task=task)
    return {name: preparation.plan(sample, part) for name, part in parts.items()}


class GroupTaskEncoder(Qwen3VLTaskEncoder):
    """Energon's hooks for records of several sequences; this class reads those of a task."""

    def _planned(self, sample: RawSample) -> dict[str, Any]:
        plans = plan_each(self.preparation, sample, task=self.config.task)
        _require(plans, self.config)
        return {"plans": list(plans.values()), "target": next(iter(plans.values())).target}

    def _batch(self, assemble: Callable[..., Batch], records: list[EncodedRecord]) -> Batch:
        batch = super()._batch(assemble, records)
        targets = [record.target for record in records]
        return replace(
            batch,
            groups=tuple(len(record.sequences) for record in records),
            targets=None if None in targets else torch.tensor(targets, dtype=torch.float32),
        )


class PairTaskEncoder(GroupTaskEncoder):
    """Energon's hooks for preference records."""

    @stateless
    def preencode_sample(self, sample: RawSample) -> Any:
        """Tokenise a pair, and check that its reference is of these tokens."""
        planned = super().preencode_sample(sample)
        if self._references:  # outside of the guard, so that the error stops the run
            tokens = [plan.input_ids for plan in planned.plans]
            self._references[sample.source].check(number_of(sample), *tokens)
        return planned

    def _planned(self, sample: RawSample) -> dict[str, Any]:
        plans = plan_each(self.preparation, sample, task="pairs")
        sides = [plans[side] for side in SIDES]
        check_length(self.config, sides)  # an over-long pair may have no reference
        if not self._references:
            return {"plans": sides}
        return {"plans": sides, "reference": self._references[sample.source].of(number_of(sample))}

    def _batch(self, assemble: Callable[..., Batch], records: list[EncodedRecord]) -> Batch:
        batch = super()._batch(assemble, records)
        if not self._references:
            return batch
        return replace(batch, references=torch.tensor([pair.reference for pair in records]))


class LabelledTaskEncoder(GroupTaskEncoder):
    """Energon's hooks for labelled records, each of which is one sequence.

    The records of a micro-batch exchange their answers for KTO's baseline: each prompt is also
    followed by the answer of the record before it, the first one's by the last. TRL does the same
    in the batches of a device.
    """

    def _planned(self, sample: RawSample) -> dict[str, Any]:
        parsed = self.preparation.parse_each(sample).get("")
        if not isinstance(parsed, Conversation) or parsed.label is None:
            raise BadSample(
                "it is not a labelled record: --loss kto needs a label that is true or false."
            )
        return {"plans": [self.preparation.plan(sample, parsed)], "label": parsed.label}

    def _length(self, sample: PlannedRecord) -> int:
        """Return the tokens that a record may take with the answer of another.

        The tokens of a pack remain the same, but each sequence may need more padding.
        """
        more = self.config.length_multiple - 1
        length = self.config.padded(len(sample.plans[0].input_ids) + more)
        return min(length, self.config.seq_length)

    def _batch(self, assemble: Callable[..., Batch], records: list[EncodedRecord]) -> Batch:
        batch = super()._batch(assemble, records)
        sequences = [record.sequences[0] for record in records]
        answers = [sequences[-1], *sequences[:-1]]
        pairs = zip(sequences, answers, strict=True)
        other = assemble([_answered(one, by, self.config.seq_length) for one, by in pairs])
        visual = other.visual and without_pixels(other.visual)
        return replace(
            batch,
            desirable=torch.tensor([record.label for record in records]),
            mismatched=replace(other, visual=visual),
        )


def _answered(sample: EncodedSample, by: EncodedSample, most: int) -> EncodedSample:
    """Return the prompt of `sample` with the answer of `by`, cut to at most `most` tokens."""
    own, start = (int((one.loss_weights > 0).nonzero()[0]) for one in (sample, by))
    return replace(
        sample,
        input_ids=torch.cat([sample.input_ids[:own], by.input_ids[start:]])[:most],
        loss_weights=torch.cat([sample.loss_weights[:own], by.loss_weights[start:]])[:most],
    )


def _require(plans: Mapping[str, Plan], config: DataConfig) -> None:
    """
    Raises:
        BadSample: the record lacks what training for the task needs, or is made for another loss.
    """
    needed = _NEEDED[config.task]
    for name in needed:
        if name not in plans:
            raise BadSample(
                f"--task {config.task} trains on {' and '.join(needed)}; the record has no {name}."
            )
    score = plans[needed[0]].target
    if config.similarities and (score is None or len(plans) != len(needed)):
        raise BadSample(
            "--embedding-loss cosine and cosent train on two texts with a score; the record has "
            f"{'no score' if score is None else 'negatives'}."
        )
    if config.task == "embedding" and not config.similarities and score not in (None, 1.0):
        raise BadSample(
            f"its score is {score:g}, and this would train on it as on any positive: add "
            "--embedding-loss cosine or cosent, or take the key out."
        )
