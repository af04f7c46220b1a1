"""Energon's pipeline for preference pairs, whose two sequences are always in one micro-batch.

A batch's sequences are chosen, rejected, chosen, rejected, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.energon import Sample, edataclass, stateless
from megatron.energon.source_info import get_source_info

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.encoding.encoder import Qwen3VLTaskEncoder
from mcore_qwen3vl.data.encoding.packing import best_fit
from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.data.encoding.samples import EncodedSample, RawSample
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.records.bad_samples import sample_id
from mcore_qwen3vl.data.records.flaws import BadSample, OverlongSample
from mcore_qwen3vl.data.records.preference import written_otherwise
from mcore_qwen3vl.data.scores import References


@edataclass
class PlannedPair(Sample):
    """A tokenised pair; its media are measured but not decoded."""

    chosen: Plan
    rejected: Plan
    reference: tuple[float, float] | None
    source: int
    name: str


@edataclass
class EncodedPair(Sample):
    """A pair that is ready to be batched."""

    chosen: EncodedSample
    rejected: EncodedSample
    reference: tuple[float, float] | None


def plan_each(preparation: Preparation, sample: RawSample) -> tuple[Plan, ...]:
    """Tokenise a raw record: one sequence, or the two of a preference record.

    Raises:
        BadSample, OverlongSample: the record cannot be used. Each sequence must fit by itself;
            whether both fit together is not checked.
    """
    return tuple(preparation.plan(sample, part) for part in preparation.parse_each(sample))


def padded(config: DataConfig, plans: Sequence[Plan]) -> int:
    """Return how many tokens of a pack the sequences take."""
    return sum(config.padded(len(plan.input_ids)) for plan in plans)


def check_length(config: DataConfig, plans: Sequence[Plan]) -> None:
    """Raise if a pack cannot hold both sequences; the planner checked that each fits a row.

    Raises:
        OverlongSample: the sequences together are longer than a pack.
    """
    length = padded(config, plans)
    if config.packing and length > config.seq_length:
        raise OverlongSample(f"{length} tokens in both, more than seq_length {config.seq_length}.")


class PairTaskEncoder(Qwen3VLTaskEncoder):
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
                said = "it is not a preference record: --loss dpo needs chosen and rejected."
                raise BadSample(f"{said} {written_otherwise(sample.record)}".rstrip())
            chosen, rejected = plans
            check_length(self.config, plans)
            found = self._references_of(sample)
            reference = found[0].of(found[1]) if found else None
        if found:  # outside the block above, so that the error stops the run
            found[0].check(found[1], chosen.input_ids, rejected.input_ids)
        return PlannedPair.derive_from(
            sample,
            chosen=chosen,
            rejected=rejected,
            reference=reference,
            source=sample.source,
            name=sample_id(sample),
        )

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Choose which pairs of a full buffer share sequences."""
        lengths = [padded(self.config, (pair.chosen, pair.rejected)) for pair in samples]
        return [[samples[i] for i in pack] for pack in best_fit(lengths, self.config.seq_length)]

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        """Decode the pixels, only once if both sequences have the same media."""
        with self.guard.skipping(sample):
            of_chosen = self.preparation.pixels(sample.chosen, sample.source)
            shared = _shown(sample.chosen) == _shown(sample.rejected)
            of_rejected = (
                of_chosen if shared else self.preparation.pixels(sample.rejected, sample.source)
            )
        chosen, rejected = (
            EncodedSample.derive_from(
                sample,
                input_ids=plan.token_tensor(),
                loss_weights=plan.weight_tensor(),
                pixels=pixels,
                name=sample.name,
            )
            for plan, pixels in ((sample.chosen, of_chosen), (sample.rejected, of_rejected))
        )
        return EncodedPair.derive_from(
            sample, chosen=chosen, rejected=rejected, reference=sample.reference
        )

    def _batch(self, assemble: Callable[..., Batch], pairs: list[Any]) -> Batch:
        sequences = [one for pair in pairs for one in (pair.chosen, pair.rejected)]
        batch = super()._batch(assemble, sequences)
        if self._references is None:
            return batch
        return replace(batch, references=torch.tensor([pair.reference for pair in pairs]))

    def _references_of(self, sample: Any) -> tuple[References, int] | None:
        """Return the references of a sample's data set, and the sample's number among them."""
        if self._references is None:
            return None
        return self._references[sample.source], int(get_source_info(sample)[0].index)


def _shown(plan: Plan) -> list[Any]:
    return [item.media for item in plan.media]
