"""The pipeline as energon runs it in data workers: cook, plan, choose, decode, batch.


Samples are planned (tokenised and measured) before the packing buffer and decoded after it, so
that the buffer holds tokens and file names, not pixels, and is cheap to rebuild on resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron.energon import (
    Cooker,
    CrudeSample,
    SkipSample,
    TaskEncoder,
    basic_sample_keys,
    stateless,
)

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.batch import Batch, Batcher
from mcore_qwen3vl.data.encoding.packing import best_fit
from mcore_qwen3vl.data.encoding.pixels import Pixels
from mcore_qwen3vl.data.encoding.planning import Plan, check_length, padded
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.data.encoding.samples import (
    EncodedRecord,
    EncodedSample,
    PlannedRecord,
    RawSample,
)
from mcore_qwen3vl.data.loading.bad_samples import BadSampleGuard, number_of, sample_id
from mcore_qwen3vl.data.loading.datasets import SOURCE
from mcore_qwen3vl.data.loading.sources import Source, source_names
from mcore_qwen3vl.data.scores import References
from mcore_qwen3vl.data.teacher import joined, teachers_of


def raw_sample(preparation: Preparation, sample: CrudeSample) -> RawSample:
    """Return energon's crude sample, of any data set, with the folder of its media."""
    return RawSample(
        **basic_sample_keys(sample),
        record=sample.get("json"),
        folder=preparation.folder(sample),
        source=sample["__subflavors__"][SOURCE],
    )


class Qwen3VLTaskEncoder(TaskEncoder[RawSample, EncodedRecord, Batch, Batch]):
    """Energon's hooks; each is deterministic, so that energon can repeat it on resume."""

    decoder = None  # WebDataset parts stay bytes

    def __init__(
        self,
        architecture: Architecture,
        processor: Any,
        config: DataConfig,
        sources: Sequence[Source],
    ) -> None:
        self.config = config
        self.guard = BadSampleGuard(config.max_bad_fraction, config.bad_fraction_floor)
        self.preparation = Preparation(processor, config, sources)
        self._teachers = teachers_of(
            sources,
            config.teacher_temperature,
            tokenizer=processor.tokenizer,
            vocab_size=architecture.vocab_size,
        )
        self._references = [
            References.beside(source.path) for source in sources if config.references
        ]
        self._source_names = source_names(sources)
        self.cookers = (Cooker(self.cook),)
        pad_id = processor.tokenizer.pad_token_id
        self._batcher = Batcher(architecture, config, pad_id, self.preparation.scale)

    @stateless
    def cook(self, sample: CrudeSample) -> Any:
        """Return energon's crude sample with the folder of its media."""
        return raw_sample(self.preparation, sample)

    @stateless
    def preencode_sample(self, sample: RawSample) -> Any:
        """Tokenise the sequences of a record and measure their media."""
        with self.guard.skipping(sample):
            planned = self._planned(sample)
            check_length(self.config, planned["plans"])
        return PlannedRecord.derive_from(
            sample, **planned, source=sample.source, name=sample_id(sample)
        )

    def _planned(self, sample: RawSample) -> dict[str, Any]:
        """Return the fields of the planned record that depend on its kind.

        Raises:
            BadSample, OverlongSample: the record cannot be used.
        """
        return {"plans": [self.preparation.plan(sample)]}

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Choose which records of a full buffer share sequences."""
        lengths = [self._length(sample) for sample in samples]
        return [[samples[i] for i in pack] for pack in best_fit(lengths, self.config.seq_length)]

    def _length(self, sample: PlannedRecord) -> int:
        """Return how many tokens of a pack a record takes."""
        return padded(self.config, sample.plans)

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        """Decode the pixels, only once for neighbours that have the same media."""
        pixels: list[Pixels] = []
        with self.guard.skipping(sample):
            for number, plan in enumerate(sample.plans):
                again = number and _shown(plan) == _shown(sample.plans[number - 1])
                pixels.append(pixels[-1] if again else self.preparation.pixels(plan, sample.source))
            top = self._teachers[sample.source].of(number_of(sample)) if self._teachers else None
        if self._teachers:  # outside of the guard's block, so that the error stops the run
            self._teachers[sample.source].check(number_of(sample), sample.plans[0])
        sequences = [
            EncodedSample.derive_from(
                sample,
                input_ids=plan.token_tensor(),
                loss_weights=plan.weight_tensor(),
                pixels=seen,
                name=sample.name,
                source=sample.source,
                teacher=top,
            )
            for plan, seen in zip(sample.plans, pixels, strict=True)
        ]
        kept = {name: getattr(sample, name) for name in ("reference", "target", "label")}
        return EncodedRecord.derive_from(sample, sequences=sequences, **kept)

    @stateless
    def pack_selected_samples(self, samples: list[EncodedRecord]) -> Batch:
        """Make a packed batch."""
        return self._batch(self._batcher.pack, samples)

    @stateless
    def batch(self, samples: list[EncodedRecord]) -> Batch:
        """Make a padded batch."""
        return self._batch(self._batcher.pad, samples)

    def _batch(self, assemble: Callable[..., Batch], records: list[EncodedRecord]) -> Batch:
        if not records:  # all samples had bad pixels
            raise SkipSample
        samples = [one for record in records for one in record.sequences]
        skipped, dropped = self.guard.take()
        batch = assemble(samples, skipped, dropped)
        if self._teachers:
            batch = replace(batch, teacher=joined([one.teacher for one in samples if one.teacher]))
        if not self._source_names:
            return batch
        return replace(batch, data_sets=tuple(self._source_names[one.source] for one in samples))


def _shown(plan: Plan) -> list[Any]:
    return [item.media for item in plan.media]
