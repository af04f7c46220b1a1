"""Energon's pipeline for records of several sequences, which are always in one micro-batch.

A batch holds the sequences of one record after the other: chosen and rejected of a preference
record; query, positive and negatives of a retrieval record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.energon import Sample, edataclass, stateless

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, Task
from mcore_qwen3vl.data.encoding.batch import Batch, without_pixels
from mcore_qwen3vl.data.encoding.encoder import Qwen3VLTaskEncoder
from mcore_qwen3vl.data.encoding.packing import best_fit
from mcore_qwen3vl.data.encoding.pixels import Pixels
from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.data.encoding.samples import EncodedSample, RawSample, encoded
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.records.bad_samples import number_of, sample_id
from mcore_qwen3vl.data.records.flaws import BadSample, OverlongSample
from mcore_qwen3vl.data.records.parsed import Conversation
from mcore_qwen3vl.data.records.preference import SIDES
from mcore_qwen3vl.data.records.retrieval import POSITIVE, QUERY
from mcore_qwen3vl.data.scores import References

_NEEDED: dict[Task | None, tuple[str, ...]] = {
    "embedding": (QUERY, POSITIVE),
    "reranker": (POSITIVE,),  # in its prompt is the query
    "reward": SIDES,
    "classify": ("",),
}
"""By task, the sequences that a record needs."""


@edataclass
class PlannedGroup(Sample):
    """The tokenised sequences of a record; their media are measured but not decoded."""

    plans: list[Plan]
    source: int
    name: str
    reference: tuple[float, float] | None = None
    target: float | tuple[float, ...] | None = None
    label: bool | None = None


@edataclass
class EncodedGroup(Sample):
    """A record that is ready to be batched."""

    sequences: list[EncodedSample]
    reference: tuple[float, float] | None
    target: float | tuple[float, ...] | None
    label: bool | None


def plan_each(
    preparation: Preparation, sample: RawSample, *, task: Task | None = None
) -> dict[str, Plan]:
    """Tokenise the sequences of a raw record, by their names in :meth:`Preparation.parse_each`.

    Raises:
        BadSample, OverlongSample: the record cannot be used. Each sequence must fit by itself;
            whether they fit together is not checked.
    """
    parts = preparation.parse_each(sample, task=task)
    return {name: preparation.plan(sample, part) for name, part in parts.items()}


def padded(config: DataConfig, plans: Sequence[Plan]) -> int:
    """Return how many tokens of a pack the sequences take."""
    return sum(config.padded(len(plan.input_ids)) for plan in plans)


def check_length(config: DataConfig, plans: Sequence[Plan]) -> None:
    """Raise if a pack cannot hold all sequences; the planner checked that each fits a row.

    Raises:
        OverlongSample: the sequences together are longer than a pack.
    """
    length = padded(config, plans)
    if config.packing and length > config.seq_length:
        which = "both" if len(plans) == 2 else f"all {len(plans)}"
        raise OverlongSample(
            f"{length} tokens in {which}, more than seq_length {config.seq_length}."
        )


class GroupTaskEncoder(Qwen3VLTaskEncoder):
    """Energon's hooks for records of several sequences; this class reads those of a task."""

    @stateless
    def preencode_sample(self, sample: RawSample) -> Any:
        """Tokenise the sequences and measure their media."""
        with self.guard.skipping(sample):
            plans = plan_each(self.preparation, sample, task=self.config.task)
            _require(plans, self.config)
            check_length(self.config, list(plans.values()))
        return PlannedGroup.derive_from(
            sample,
            plans=list(plans.values()),
            source=sample.source,
            name=sample_id(sample),
            target=next(iter(plans.values())).target,
        )

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Choose which records of a full buffer share sequences."""
        lengths = [padded(self.config, sample.plans) for sample in samples]
        return [[samples[i] for i in pack] for pack in best_fit(lengths, self.config.seq_length)]

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        """Decode the pixels, only once for neighbours that have the same media."""
        pixels: list[Pixels] = []
        with self.guard.skipping(sample):
            for number, plan in enumerate(sample.plans):
                again = number and _shown(plan) == _shown(sample.plans[number - 1])
                pixels.append(pixels[-1] if again else self.preparation.pixels(plan, sample.source))
        sequences = [
            encoded(sample, plan, seen, sample.name, sample.source)
            for plan, seen in zip(sample.plans, pixels, strict=True)
        ]
        return EncodedGroup.derive_from(
            sample,
            sequences=sequences,
            reference=sample.reference,
            target=sample.target,
            label=sample.label,
        )

    def _batch(self, assemble: Callable[..., Batch], groups: list[Any]) -> Batch:
        batch = super()._batch(assemble, [one for group in groups for one in group.sequences])
        targets = [group.target for group in groups]
        return replace(
            batch,
            groups=tuple(len(group.sequences) for group in groups),
            targets=None if None in targets else torch.tensor(targets, dtype=torch.float32),
        )


class PairTaskEncoder(GroupTaskEncoder):
    """Energon's hooks for preference records.

    Args:
        architecture, processor, config, sources: as for :class:`Qwen3VLTaskEncoder`.
        references: the reference's log-probabilities for each data set; None: do not add them.
    """

    def __init__(
        self,
        architecture: Architecture,
        processor: Any,
        config: DataConfig,
        sources: Sequence[Source],
        references: Sequence[References] | None,
    ) -> None:
        super().__init__(architecture, processor, config, sources)
        self._references = references

    @stateless
    def preencode_sample(self, sample: RawSample) -> Any:
        """Tokenise a pair, measure its media, and look up its reference."""
        with self.guard.skipping(sample):
            plans = plan_each(self.preparation, sample)
            if len(plans) == 1:
                raise BadSample(
                    "it is not a preference record: --loss dpo, simpo and orpo need chosen and "
                    "rejected."
                )
            chosen, rejected = (plans[side] for side in SIDES)
            check_length(self.config, (chosen, rejected))
            found = self._references_of(sample)
            reference = found[0].of(found[1]) if found else None
        if found:  # outside the block above, so that the error stops the run
            found[0].check(found[1], chosen.input_ids, rejected.input_ids)
        return PlannedGroup.derive_from(
            sample,
            plans=[chosen, rejected],
            reference=reference,
            source=sample.source,
            name=sample_id(sample),
        )

    def _batch(self, assemble: Callable[..., Batch], groups: list[Any]) -> Batch:
        batch = super()._batch(assemble, groups)
        if self._references is None:
            return batch
        return replace(batch, references=torch.tensor([pair.reference for pair in groups]))

    def _references_of(self, sample: Any) -> tuple[References, int] | None:
        """Return the references of a sample's data set, and the sample's number among them."""
        if self._references is None:
            return None
        return self._references[sample.source], number_of(sample)


class LabelledTaskEncoder(GroupTaskEncoder):
    """Energon's hooks for labelled records, each of which is one sequence.

    The records of a micro-batch exchange their answers for KTO's baseline: each prompt is also
    followed by the answer of the record before it, the first one's by the last. TRL does the same
    in the batches of a device.
    """

    @stateless
    def preencode_sample(self, sample: RawSample) -> Any:
        """Tokenise a record and measure its media."""
        with self.guard.skipping(sample):
            parsed = self.preparation.parse_each(sample).get("")
            if not isinstance(parsed, Conversation) or parsed.label is None:
                raise BadSample(
                    "it is not a labelled record: --loss kto needs a label that is true or false."
                )
            plan = self.preparation.plan(sample, parsed)
        return PlannedGroup.derive_from(
            sample, plans=[plan], label=parsed.label, source=sample.source, name=sample_id(sample)
        )

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Choose which records share sequences, so that they fit with exchanged answers, too.

        The tokens of a pack remain the same, but each sequence may need more padding.
        """
        more, most = self.config.length_multiple - 1, self.config.seq_length
        lengths = [
            min(self.config.padded(len(one.plans[0].input_ids) + more), most) for one in samples
        ]
        return [[samples[i] for i in pack] for pack in best_fit(lengths, most)]

    def _batch(self, assemble: Callable[..., Batch], groups: list[Any]) -> Batch:
        batch = super()._batch(assemble, groups)
        sequences = [group.sequences[0] for group in groups]
        answers = [sequences[-1], *sequences[:-1]]
        pairs = zip(sequences, answers, strict=True)
        other = assemble([_answered(one, by, self.config.seq_length) for one, by in pairs])
        visual = other.visual and without_pixels(other.visual)
        return replace(
            batch,
            desirable=torch.tensor([group.label for group in groups]),
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


def _shown(plan: Plan) -> list[Any]:
    return [item.media for item in plan.media]
