"""The pipeline as energon runs it in data workers: cook, plan, choose, decode, batch.

Samples are planned (tokenised and measured) before the packing buffer and decoded after it, so
that the buffer holds tokens and file names, not pixels, and is cheap to rebuild on resume. What is
done with one record is :class:`.preparation.Preparation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from megatron.energon import (
    Cooker,
    CrudeSample,
    Sample,
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    edataclass,
    stateless,
)
from megatron.energon.errors import SYSTEM_EXCEPTIONS
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.wrappers.map_dataset import MapDataset

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, Source, names_to_log
from mcore_qwen3vl.data.datasets import NumberedSamples
from mcore_qwen3vl.data.encoding.batch import (
    Batch,
    Batcher,
    Counts,
)
from mcore_qwen3vl.data.encoding.guard import BadSampleGuard, Probe, unusable_error
from mcore_qwen3vl.data.encoding.packing import EpochOf, EpochPacking, best_fit
from mcore_qwen3vl.data.encoding.planning import (
    Pixels,
    Plan,
    check_length,
    spare_plan,
)
from mcore_qwen3vl.data.encoding.preparation import Preparation, RawSample
from mcore_qwen3vl.data.order import Block, Stream
from mcore_qwen3vl.data.places import number_of, sample_id
from mcore_qwen3vl.data.processor import require_fitting
from mcore_qwen3vl.data.sidecar import OpenSidecar
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.errors import BadInput

_TRIED = 1000
"""Records of a data set among which one is looked for that can be used."""


@edataclass
class PlannedRecord(Sample):
    """A tokenised record, whose media are measured; they are decoded once it has been chosen."""

    plans: list[Plan]  # one for each sequence
    source: int
    name: str
    target: float | tuple[float, ...] | None = None
    beside: Any = None  # what the sidecar has for it, once it has been chosen


class Qwen3VLTaskEncoder(TaskEncoder[RawSample, PlannedRecord, Batch, Batch]):
    """Energon's hooks; each is deterministic, so that energon can repeat it on resume.

    Who calls them depends on the kind of loader, of :mod:`mcore_qwen3vl.data.loader_kinds`:

    * ``Records``, and every validation: :meth:`read_block` calls :meth:`cook`,
      :meth:`preencode_sample` and :meth:`postencode_sample` for each record of a micro-batch, then
      :meth:`batch`.
    * ``OwnPacks``: :meth:`read_and_plan` calls :meth:`cook` and :meth:`preencode_sample` for each
      record on its way into the buffer. Energon calls :meth:`select_samples_to_pack` for a full
      buffer, and for each pack :meth:`postencode_sample`, record by record, then
      :meth:`pack_selected_samples`.
    * ``SharedPacks``: the same, of :class:`.balanced.BalancedTaskEncoder`. It gives the buffer the
      sizes of records in place of their tokens, and reads a record once its pack is this rank's.
    * ``Shards``: energon calls the same hooks in the same order, with :meth:`batch` at the end if
      rows hold a record each. With balanced work the hooks are ``BalancedTaskEncoder``'s, too.
    """

    decoder = None  # WebDataset parts stay bytes

    def __init__(
        self,
        architecture: Architecture,
        processor: Any,
        config: DataConfig,
        sources: Sequence[Source],
    ) -> None:
        require_fitting(processor, architecture)
        self.config = config
        self.guard = BadSampleGuard(
            config.max_bad_fraction, config.bad_fraction_floor, counts_again=config.counts_again
        )
        self.preparation = Preparation(processor, config, sources)
        self._sidecars: Sequence[OpenSidecar] = ()  # one for each source, if the loss reads any
        if config.sidecar is not None:
            paths = [source.path for source in sources]
            self._sidecars = config.sidecar.open(
                paths, processor.tokenizer, architecture.vocab_size
            )
        self._source_names = names_to_log(sources)
        self.cookers = (Cooker(self.cook),)
        self._pad_id = processor.tokenizer.pad_token_id
        self._batcher = Batcher(architecture, config, self._pad_id, self.preparation.scale)
        self.data_sets: Sequence[NumberedSamples] = ()
        """The data sets, whose records can be read by number."""
        self._carrier: PlannedRecord | None = None
        self._tried: set[int] = set()
        """The sources that were searched for a usable record."""

    @stateless
    def cook(self, sample: CrudeSample) -> Any:
        """Return energon's crude sample with the folder of its media."""
        return self.preparation.raw(sample)

    @stateless
    def preencode_sample(self, sample: RawSample) -> Any:
        """Tokenise the sequences of a record and measure their media."""
        with self._fail_if_source_is_unusable(sample.source), self.guard.skip_bad_samples(sample):
            planned = self._plan_fields(sample)
            check_length(self.config, planned["plans"])  # a sidecar may lack over-long records
            left = (item for plan in planned["plans"] for item in plan.unused)
            self.guard.log_unused(sample_id(sample), left)
            if self._sidecars:
                self._sidecars[sample.source].require(number_of(sample), planned["plans"])
        return PlannedRecord.derive_from(
            sample, **planned, source=sample.source, name=sample_id(sample)
        )

    def _plan_fields(self, sample: RawSample) -> dict[str, Any]:
        """Return the fields of the planned record that depend on the form of records."""
        if (form := self.config.records) is None:
            return {"plans": [self.preparation.plan(sample)]}
        plans = self.preparation.plan_each(sample, form)
        form.require_trainable(plans)
        return {"plans": list(plans.values()), "target": next(iter(plans.values())).target}

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Choose which records of a full buffer share sequences."""
        lengths = [self._packed_length(sample) for sample in samples]
        return [[samples[i] for i in pack] for pack in best_fit(lengths, self.config.seq_length)]

    def _packed_length(self, sample: PlannedRecord) -> int:
        """Return how many tokens of a pack the sequences of a record take."""
        lengths = [len(plan.input_ids) for plan in sample.plans]
        if (form := self.config.records) is None:
            return self.config.padded(*lengths)
        return form.packed_length(lengths, self.config.length_multiple, self.config.seq_length)

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        """Decode the pixels, only once for neighbours that have the same media."""
        pixels: list[Pixels] = []
        with self._fail_if_source_is_unusable(sample.source), self.guard.skip_bad_samples(sample):
            for number, plan in enumerate(sample.plans):
                same_media = number and _media_of(plan) == _media_of(sample.plans[number - 1])
                pixels.append(
                    pixels[-1] if same_media else self.preparation.load_pixels(plan, sample.source)
                )
            beside = None
            if self._sidecars:
                beside = self._sidecars[sample.source].look_up(number_of(sample), sample.plans)
        self.guard.note_usable()
        decoded = zip(sample.plans, pixels, strict=True)
        plans = [replace(plan, media=[], pixels=patches) for plan, patches in decoded]
        return replace(sample, plans=plans, beside=beside)

    @stateless
    def pack_selected_samples(self, samples: list[PlannedRecord]) -> Batch:
        return self._make_batch(self._batcher.pack, samples)

    @stateless
    def batch(self, samples: list[PlannedRecord]) -> Batch:
        return self._make_batch(self._batcher.pad, samples)

    @stateless
    def read_block(self, block: Block) -> Batch:
        """Read the records of a micro-batch; those that cannot be used leave it smaller."""
        records = []
        for data_set, number in block.records:
            with suppress(SkipSample):
                records.append(self._read_record(data_set, number))
        return self.batch(records)

    def _read_record(self, data_set: int, number: int) -> PlannedRecord:
        """Read and decode one record; raise SkipSample if it cannot be used."""
        samples = self.data_sets[data_set]
        planned = self.read_and_plan(samples, samples.raw(number))
        record: PlannedRecord = self.postencode_sample(planned)
        return record

    def read_and_plan(self, samples: NumberedSamples, raw: RawSampleData) -> Any:
        """Parse and plan a sample of a data set."""
        try:
            sample = self.cook(samples.crude(raw))
        except (SkipSample, BadInput, *SYSTEM_EXCEPTIONS):
            raise
        except Exception as error:  # as in energon's own chain, any exception makes it bad
            with self._fail_if_source_is_unusable(samples.source):
                self.guard.on_error(error, raw, None)
                raise SkipSample from error
        return self.preencode_sample(sample)

    @contextmanager
    def _fail_if_source_is_unusable(self, source: int) -> Iterator[None]:
        """When the block skips a record of a data set, look once whether another can be used.

        Raises:
            BadInput: none can. Otherwise a run would read on for ever, or train on nothing.
        """
        try:
            yield
        except SkipSample:
            if source not in self._tried:
                self._tried.add(source)
                self._look_for_usable(source)
            raise

    def _look_for_usable(self, source: int) -> None:
        """Raise BadInput if a data set of the source has no record that can be used."""
        for data_set, samples in enumerate(self.data_sets):
            if samples.source == source:
                read = partial(self._read_record, data_set)
                self._try_records(samples.path, range(len(samples)), read)

    def _try_records(
        self, path: Path, records: Sequence[int], read: Callable[[int], object]
    ) -> None:
        """Raise BadInput unless `read` can use one of some records, drawn from all."""
        tried = Random(0).sample(records, min(len(records), _TRIED))
        guard, probe = self.guard, Probe()
        self.guard = probe
        try:
            for record in tried:
                with suppress(SkipSample):
                    read(record)
                    return
        finally:
            self.guard = guard
        which = "all" if len(tried) == len(records) else f"{len(tried):,}, drawn from all of them,"
        raise unusable_error(path, which, probe.first)

    def build_packs(self, stream: Stream, buffer: int, workers: WorkerConfig) -> Any:
        """Build the data set of a stream's packs; samples are read as it is iterated."""

        def read(raw: RawSampleData) -> Any:
            sample = self.read_and_plan(stream.samples_of(raw), raw)
            sample.__restore_key__ = raw.__restore_key__
            return sample

        samples = MapDataset(stream, read, stateless_map_fn=True, worker_config=workers)
        # Energon's own: BalancedTaskEncoder's is for tars. Here `_pack_by_epoch` shares the packs.
        packing = TaskEncoder.build_batch(
            self, samples, batch_size=None, packing_buffer_size=buffer, worker_config=workers
        )
        return self._pack_by_epoch(packing, stream.epoch_of)

    def _pack_by_epoch(self, packing: Any, epoch_of: EpochOf) -> EpochPacking:
        return EpochPacking(packing, epoch_of, self.select_samples_to_pack)

    def _spare_record(self) -> PlannedRecord:
        """Return a record that stands in a batch without any; its losses are not counted."""
        if not (self._sidecars or self.config.records):
            return PlannedRecord(
                **dict.fromkeys(("__key__", "__restore_key__"), ""),
                plans=[spare_plan(self._pad_id)], source=0, name="",
            )  # fmt: skip
        # The first record that can be used is read once, and stands in for all.
        sizes = map(len, self.data_sets)
        for data_set, number in ((d, n) for d, size in enumerate(sizes) for n in range(size)):
            if self._carrier is not None:
                break
            with suppress(SkipSample):
                self._carrier = self._read_record(data_set, number)
        assert self._carrier is not None, "each skipped record has looked for another"
        return self._carrier

    def _make_batch(self, assemble: Callable[..., Batch], records: list[PlannedRecord]) -> Batch:
        """Make a batch with the counts since the last one; without records, a spare batch."""
        skipped, dropped = self.guard.take_counts()
        is_spare = not records
        if is_spare:
            with self.guard.uncounted():
                records = [self._spare_record()]
        batch = self._assemble(assemble, records)
        if is_spare:
            # Routers, which know nothing of the loss, count its tokens as padding.
            padding = torch.ones_like(batch.padding_mask)
            nothing = replace(batch, counts=Counts(), names=(), data_sets=())
            batch = replace(nothing, is_spare=True, padding_mask=padding)
        return replace(batch, counts=replace(batch.counts, skipped=skipped, dropped=dropped))

    def _assemble(self, assemble: Callable[..., Batch], records: list[PlannedRecord]) -> Batch:
        """Make a batch of records, with what their task needs and the names of their data sets."""
        owners = [record for record in records for _ in record.plans]
        plans = [plan for record in records for plan in record.plans]
        batch = assemble(plans, [record.name for record in owners])
        batch = replace(batch, task=self._task_inputs(assemble, records))
        if self.config.records is not None:
            batch = replace(batch, groups=tuple(len(record.plans) for record in records))
        if not self._source_names:
            return batch
        names = tuple(self._source_names[record.source] for record in owners)
        return replace(batch, data_sets=names)

    def _task_inputs(
        self, assemble: Callable[..., Batch], records: list[PlannedRecord]
    ) -> TaskInputs | None:
        """Return what the records give the task's loss besides tokens."""
        kind = self.config.inputs
        return kind.of_records(records, assemble, self.config) if kind else None


def _media_of(plan: Plan) -> list[Any]:
    return [item.media for item in plan.media]
