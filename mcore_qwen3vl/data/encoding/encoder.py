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
from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.data.encoding.samples import EncodedSample, PlannedSample, RawSample, encoded
from mcore_qwen3vl.data.loading.datasets import SOURCE
from mcore_qwen3vl.data.loading.sources import Source, source_names
from mcore_qwen3vl.data.records.bad_samples import BadSampleGuard, number_of, sample_id
from mcore_qwen3vl.data.teacher import Top, joined, teachers_of


def raw_sample(preparation: Preparation, sample: CrudeSample) -> RawSample:
    """Return energon's crude sample, of any data set, with the folder of its media."""
    return RawSample(
        **basic_sample_keys(sample),
        record=sample.get("json"),
        folder=preparation.folder(sample),
        source=sample["__subflavors__"][SOURCE],
    )


class Qwen3VLTaskEncoder(TaskEncoder[RawSample, EncodedSample, Batch, Batch]):
    """Energon's hooks; each is deterministic, so that energon can repeat it on resume."""

    decoder = None  # WebDataset parts stay bytes

    def __init__(
        self,
        architecture: Architecture,
        processor: Any,
        config: DataConfig,
        sources: Sequence[Source],
    ) -> None:
        """Prepare the steps of the pipeline.

        Args:
            architecture: the model's shape.
            processor: HF ``Qwen3VLProcessor``; its budgets are set to those of `config`.
            config: lengths and policies.
            sources: the data sets.
        """
        self.config = config
        self.guard = BadSampleGuard(config.max_bad_fraction, config.bad_fraction_floor)
        self.preparation = Preparation(processor, config, sources)
        self._teachers = teachers_of(
            sources,
            config.teacher_temperature,
            tokenizer=processor.tokenizer,
            vocab_size=architecture.vocab_size,
        )
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
        """Tokenise a sample and measure its media."""
        with self.guard.skipping(sample):
            plan = self.preparation.plan(sample)
        return PlannedSample.derive_from(
            sample, plan=plan, source=sample.source, name=sample_id(sample)
        )

    def select_samples_to_pack(self, samples: list[PlannedSample]) -> list[list[PlannedSample]]:
        """Choose which samples of a full buffer share sequences."""
        lengths = [self.config.padded(len(sample.plan.input_ids)) for sample in samples]
        packs = best_fit(lengths, self.config.seq_length)
        return [[samples[index] for index in pack] for pack in packs]

    @stateless
    def postencode_sample(self, sample: Any) -> EncodedSample:
        """Decode the pixels."""
        with self.guard.skipping(sample):
            pixels = self.preparation.pixels(sample.plan, sample.source)
            teacher = self._teacher(sample, sample.source)
        self._check_teacher(sample, sample.source, sample.plan)
        return encoded(sample, sample.plan, pixels, sample.name, sample.source, teacher)

    def _teacher(self, sample: Any, source: int) -> Top | None:
        """Return the teacher's tokens for a sample as energon read it, if there is a teacher."""
        return self._teachers[source].of(number_of(sample)) if self._teachers else None

    def _check_teacher(self, sample: Any, source: int, plan: Plan) -> None:
        """Stop the run if the teacher saw other tokens, so outside of the guard's blocks."""
        if self._teachers:
            self._teachers[source].check(number_of(sample), plan)

    @stateless
    def pack_selected_samples(self, samples: list[EncodedSample]) -> Batch:
        """Make a packed batch."""
        return self._batch(self._batcher.pack, samples)

    @stateless
    def batch(self, samples: list[EncodedSample]) -> Batch:
        """Make a padded batch."""
        return self._batch(self._batcher.pad, samples)

    def _batch(self, assemble: Callable[..., Batch], samples: list[EncodedSample]) -> Batch:
        if not samples:  # all samples had bad pixels
            raise SkipSample
        skipped, dropped = self.guard.take()
        batch = assemble(samples, skipped, dropped)
        if self._teachers:
            batch = replace(batch, teacher=joined([one.teacher for one in samples if one.teacher]))
        if not self._source_names:
            return batch
        return replace(batch, data_sets=tuple(self._source_names[one.source] for one in samples))
