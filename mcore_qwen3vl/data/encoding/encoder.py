"""The pipeline as energon runs it in data workers: cook, plan, choose, decode, batch.

Samples are planned (tokenised and measured) before the packing buffer and decoded after it, so
that the buffer holds tokens and file names, not pixels, and is cheap to rebuild on resume. What is
done with one record, by the settings of the run and of its data set, is :class:`Preparation`.
Energon packs epoch by epoch: no sample is packed before all of the epoch before it are.

HF's image and video processors decode and resize to uint8, and then normalise to float32. Here
patches stay uint8 until they are on the device (:class:`mcore_qwen3vl.model.inputs.PixelScale`):
the result is the same, bit for bit, and only a quarter of the bytes are copied and sent.
"""

from __future__ import annotations

import copy
import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from megatron.energon import (
    Cooker,
    CrudeSample,
    Sample,
    SkipSample,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    stateless,
)
from megatron.energon.errors import SYSTEM_EXCEPTIONS
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.source_info import SourceInfo
from megatron.energon.wrappers import PackingDataset
from megatron.energon.wrappers.base import get_sample_restore_key
from megatron.energon.wrappers.map_dataset import MapDataset
from torch import Tensor
from transformers.image_utils import ChannelDimension

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, MediaLimits, Source, Task, names_to_log
from mcore_qwen3vl.data.datasets import SOURCE, Block, Part, Stream
from mcore_qwen3vl.data.encoding.batch import (
    Batch,
    Batcher,
    Counts,
)
from mcore_qwen3vl.data.encoding.planning import (
    Pixels,
    Plan,
    PlannedMedia,
    Planner,
    Renderer,
    check_length,
    spare_plan,
)
from mcore_qwen3vl.data.processor import require_fitting
from mcore_qwen3vl.data.readers import number_of, origin, sample_id
from mcore_qwen3vl.data.records.media import MediaFolder, load_image
from mcore_qwen3vl.data.records.parse import (
    SIDES,
    Conversation,
    Document,
    find_hook,
    is_preference,
    is_retrieval,
    join_parts,
    parse_record,
    preprocess_record,
)
from mcore_qwen3vl.data.records.reading import (
    BadSample,
    Observed,
    OverlongSample,
    reason_of,
    time_limit,
)
from mcore_qwen3vl.data.records.tasks import (
    POSITIVE,
    QUERY,
    is_classification,
    is_labelled,
    parse_classification,
    parse_judgements,
    parse_labelled,
    parse_pair,
    parse_retrieval,
    require_preference,
)
from mcore_qwen3vl.data.records.video import load_frames
from mcore_qwen3vl.data.scores import References, Top, join_tops, teachers_of
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import parse_json
from mcore_qwen3vl.model.inputs import PixelScale
from mcore_qwen3vl.unused.fields import Unused, sentences

log = logging.getLogger(__name__)

IF_TOO_LONG = "Raise --seq-length, lower the pixel budgets, or set --overlong truncate."

_TRIED = 1000
"""Records of a data set among which one is looked for that can be used."""

OVERLONG_IN_A_ROW = 1000
"""Consecutive over-long samples after which the run stops, since nothing seems to fit."""


class BadSampleGuard:
    """One worker's count of records that could not be used, each counted and logged once.

    Over-long samples are left out by policy: they are counted separately, and stop the run only
    after :data:`OVERLONG_IN_A_ROW` of them.
    """

    def __init__(self, max_fraction: float, floor: int) -> None:
        """Start counting; `floor` is ``bad_fraction_floor`` of the config."""
        self._max_fraction = max_fraction
        self._floor = floor
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

        A worker stops after `patience` records in a row that it cannot use, if that is given: it
        reads on until it has a batch, and so might for ever.
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


@edataclass
class RawSample(Sample):
    """A record as read, before it is parsed."""

    record: Any
    folder: MediaFolder
    source: int  # number of its data set


def unusable_error(path: Path, which: str, first: str) -> BadInput:
    """Return the error that no record of a data set can be used."""
    return BadInput(
        f"No record of {path} can be used: {which} were tried. The first is {first} "
        "`mcore-qwen3vl data check` lists what is wrong with each."
    )


@edataclass
class Record(Sample):
    """A tokenised record, whose media are measured; they are decoded once it has been chosen."""

    plans: list[Plan]  # one for each sequence
    source: int
    name: str
    reference: tuple[float, float] | None = None
    target: float | tuple[float, ...] | None = None
    label: bool | None = None
    teacher: Top | None = None  # at the trained tokens


class Qwen3VLTaskEncoder(TaskEncoder[RawSample, Record, Batch, Batch]):
    """Energon's hooks; each is deterministic, so that energon can repeat it on resume."""

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
        self.guard = BadSampleGuard(config.max_bad_fraction, config.bad_fraction_floor)
        self.preparation = Preparation(processor, config, sources)
        self._teachers = teachers_of(
            sources, config.teacher_temperature, processor.tokenizer, architecture.vocab_size
        )
        self._references = [References(source.path) for source in sources if config.references]
        self._source_names = names_to_log(sources)
        self.cookers = (Cooker(self.cook),)
        self._pad_id = processor.tokenizer.pad_token_id
        self._batcher = Batcher(architecture, config, self._pad_id, self.preparation.scale)
        self.parts: Sequence[Part] = ()
        """The data sets, whose records can be read by number."""
        self._carrier: Record | None = None
        self._tried: set[int] = set()
        """The sources of which a record was looked for that can be used."""

    @stateless
    def cook(self, sample: CrudeSample) -> Any:
        """Return energon's crude sample with the folder of its media."""
        return self.preparation.raw(sample)

    @stateless
    def preencode_sample(self, sample: RawSample) -> Any:
        """Tokenise the sequences of a record and measure their media."""
        with self._needing_others(sample.source), self.guard.skip_bad_samples(sample):
            planned = self._plan_fields(sample)
            check_length(self.config, planned["plans"])  # an over-long pair may have no reference
            left = (item for plan in planned["plans"] for item in plan.unused)
            self.guard.log_unused(sample_id(sample), left)
            if self._references:
                tokens = [plan.input_ids for plan in planned["plans"]]
                references = self._references[sample.source]
                planned["reference"] = references.log_probs_of(number_of(sample), tokens)
        return Record.derive_from(sample, **planned, source=sample.source, name=sample_id(sample))

    def _plan_fields(self, sample: RawSample) -> dict[str, Any]:
        """Return the fields of the planned record that depend on its kind."""
        return {"plans": [self.preparation.plan(sample)]}

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Choose which records of a full buffer share sequences."""
        lengths = [self._packed_length(sample) for sample in samples]
        return [[samples[i] for i in pack] for pack in best_fit(lengths, self.config.seq_length)]

    def _packed_length(self, sample: Record) -> int:
        """Return how many tokens of a pack the sequences of a record take."""
        return self.config.padded(*(len(plan.input_ids) for plan in sample.plans))

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        """Decode the pixels, only once for neighbours that have the same media."""
        pixels: list[Pixels] = []
        with self._needing_others(sample.source), self.guard.skip_bad_samples(sample):
            for number, plan in enumerate(sample.plans):
                same_media = number and _media_of(plan) == _media_of(sample.plans[number - 1])
                pixels.append(
                    pixels[-1] if same_media else self.preparation.load_pixels(plan, sample.source)
                )
            top = None
            if self._teachers:
                plan, teacher = sample.plans[0], self._teachers[sample.source]
                top = teacher.top_of(number_of(sample), plan.input_ids, plan.trained_tokens)
        self.guard.note_usable()
        decoded = zip(sample.plans, pixels, strict=True)
        plans = [replace(plan, media=[], pixels=patches) for plan, patches in decoded]
        return replace(sample, plans=plans, teacher=top)

    @stateless
    def pack_selected_samples(self, samples: list[Record]) -> Batch:
        return self._make_batch(self._batcher.pack, samples)

    @stateless
    def batch(self, samples: list[Record]) -> Batch:
        return self._make_batch(self._batcher.pad, samples)

    @stateless
    def read_block(self, block: Block) -> Batch:
        """Read the records of a micro-batch; those that cannot be used leave it smaller."""
        records = []
        for part, number in block.records:
            with suppress(SkipSample):
                records.append(self._read_record(part, number))
        return self.batch(records)

    def _read_record(self, part: int, number: int) -> Record:
        """Read and decode one record; raise SkipSample if it cannot be used."""
        of = self.parts[part]
        record: Record = self.postencode_sample(self.read_and_plan(of, of.raw(number)))
        return record

    def read_and_plan(self, part: Part, raw: RawSampleData) -> Any:
        """Parse and plan a sample of a data set."""
        try:
            sample = self.cook(part.crude(raw))
        except (SkipSample, BadInput, *SYSTEM_EXCEPTIONS):
            raise
        except Exception as error:  # as in energon's own chain, any exception makes it bad
            with self._needing_others(part.source):
                self.guard.on_error(error, raw, None)
                raise SkipSample from error
        return self.preencode_sample(sample)

    @contextmanager
    def _needing_others(self, source: int) -> Iterator[None]:
        """When the block skips a record of a data set, look once whether another can be used.

        Raises:
            BadInput: none can. Otherwise a run would read on for ever, or train on nothing.
        """
        try:
            yield
        except SkipSample:
            if source not in self._tried:
                self._tried.add(source)
                self._require_usable(source)
            raise

    def _require_usable(self, source: int) -> None:
        """Raise BadInput if a data set of the source has no record that can be used."""
        for number, part in enumerate(self.parts):
            if part.source == source:
                self._try_records(part.path, range(len(part)), partial(self._read_record, number))

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
            sample = self.read_and_plan(stream.part_of(raw), raw)
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

    def _spare_record(self) -> Record:
        """Return a record that stands in a batch without any; its losses are not counted."""
        if not (self._teachers or isinstance(self, GroupTaskEncoder)):
            return Record(
                **dict.fromkeys(("__key__", "__restore_key__"), ""),
                plans=[spare_plan(self._pad_id)], source=0, name="",
            )  # fmt: skip
        # The first record that can be used is read once, and stands in for all.
        for part, number in ((p, n) for p, of in enumerate(self.parts) for n in range(len(of))):
            if self._carrier is not None:
                break
            with suppress(SkipSample):
                self._carrier = self._read_record(part, number)
        assert self._carrier is not None, "each skipped record has looked for another"
        return self._carrier

    def _make_batch(self, assemble: Callable[..., Batch], records: list[Record]) -> Batch:
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

    def _assemble(self, assemble: Callable[..., Batch], records: list[Record]) -> Batch:
        """Make a batch of records, with what their task needs and the names of their data sets."""
        owners = [record for record in records for _ in record.plans]
        plans = [plan for record in records for plan in record.plans]
        batch = assemble(plans, [record.name for record in owners])
        batch = replace(batch, task=self._task_inputs(assemble, records))
        if not self._source_names:
            return batch
        names = tuple(self._source_names[record.source] for record in owners)
        return replace(batch, data_sets=names)

    def _task_inputs(
        self, assemble: Callable[..., Batch], records: list[Record]
    ) -> TaskInputs | None:
        """Return what the records give the task's loss besides tokens."""
        if self._teachers:
            return join_tops([record.teacher for record in records if record.teacher])
        kind = self.config.inputs
        return kind.of_records(records, assemble, self.config) if kind else None


def _media_of(plan: Plan) -> list[Any]:
    return [item.media for item in plan.media]


_NEEDED: dict[Task | None, tuple[str, ...]] = {
    "embedding": (QUERY, POSITIVE),
    "reranker": (POSITIVE,),  # in its prompt is the query
    "reward": SIDES,
    "classify": ("",),
}
"""By task, the sequences that a record needs."""


class GroupTaskEncoder(Qwen3VLTaskEncoder):
    """Energon's hooks for records of several sequences: those of a task, or preference records.

    A batch holds the sequences of one record after the other: chosen and rejected of a preference
    record; query, positive and negatives of a retrieval record.
    """

    def _plan_fields(self, sample: RawSample) -> dict[str, Any]:
        if self.config.pairs:
            return {"plans": list(self.preparation.plan_each(sample, task="pairs").values())}
        plans = self.preparation.plan_each(sample, task=self.config.task)
        _require_sequences_of_task(plans, self.config)
        return {"plans": list(plans.values()), "target": next(iter(plans.values())).target}

    def _assemble(self, assemble: Callable[..., Batch], records: list[Record]) -> Batch:
        batch = super()._assemble(assemble, records)
        return replace(batch, groups=tuple(len(record.plans) for record in records))


class LabelledTaskEncoder(GroupTaskEncoder):
    """Energon's hooks for labelled records, each of which is one sequence.

    The records of a micro-batch exchange their answers: :meth:`.kto.Labelled.of_records`.
    """

    def _plan_fields(self, sample: RawSample) -> dict[str, Any]:
        parsed = self.preparation.parse_each(sample).get("")
        if not isinstance(parsed, Conversation) or parsed.label is None:
            raise BadSample(
                "it is not a labelled record: --loss kto needs a label that is true or false."
            )
        return {"plans": [self.preparation.plan(sample, parsed)], "label": parsed.label}

    def _packed_length(self, sample: Record) -> int:
        """Return the tokens that a record may take with the answer of another.

        The tokens of a pack remain the same, but each sequence may need more padding.
        """
        more = self.config.length_multiple - 1
        length = self.config.padded(len(sample.plans[0].input_ids) + more)
        return min(length, self.config.seq_length)


def _require_sequences_of_task(plans: Mapping[str, Plan], config: DataConfig) -> None:
    """Raise BadSample if the record lacks what the task trains on, or is made for another loss."""
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


_FILES = (".jsonl", ".json", ".parquet")


class Preparation:
    """The steps that every worker applies to a sample of any of the data sets."""

    def __init__(self, processor: Any, config: DataConfig, sources: Sequence[Source]) -> None:
        """Set the budgets on `processor`, and import the hooks; raise BadInput if either fails."""
        config.media.apply(processor)
        self._max_seconds, self._labels = config.max_sample_seconds, config.labels
        self._sources = list(sources)
        self._renderer = Renderer(
            processor, config.document_end, allow_dropped=config.allow_dropped
        )
        processors = [_with_limits(processor, source.limits) for source in self._sources]
        self._planners = [Planner(limited, config) for limited in processors]
        self._pixels = [PixelLoader(limited) for limited in processors]
        self.scale = self._pixels[0].scale  # see PixelLoader
        for source in self._sources:
            if source.reading.preprocess is not None:
                find_hook(source.reading.preprocess)

    def raw(self, crude: CrudeSample) -> RawSample:
        """Return energon's crude sample, of any data set, with the folder of its media."""
        source = crude["__subflavors__"][SOURCE]
        root = self._sources[source].media_root
        if root is None:
            root = origin(Path(str(crude["__sources__"][0].dataset_path)))
            root = root.parent if root.suffix in _FILES and not root.is_dir() else root
        parts = {name: part for name, part in crude.items() if not name.startswith("__")}
        record = parts.pop("json", None)
        return RawSample(
            **basic_sample_keys(crude),
            record=record,
            folder=MediaFolder(root, Observed(parts, "a sample of a tar")),
            source=source,
        )

    def parse(self, sample: RawSample) -> Conversation | Document:
        """Parse a record."""
        with time_limit(self._max_seconds):
            return parse_record(
                self._json_record(sample), sample.folder, self._sources[sample.source].reading
            )

    def parse_each(
        self, sample: RawSample, *, task: Task | Literal["any", "pairs"] | None = "any"
    ) -> dict[str, Conversation | Document]:
        """Parse a record into its parts, by their names.

        Args:
            task: the task that the record is read for; None: predicting tokens; ``any``: the one
                that its keys tell, ``embedding`` for retrieval records; ``pairs``: a loss over
                preference records.

        Returns:
            One part without a name, which has a label if the record has; chosen and rejected of a
            preference record; query, positive and negatives; or, for a reranker, positive and
            negatives, each with the query.
        """
        reading = self._sources[sample.source].reading
        with time_limit(self._max_seconds):
            record = preprocess_record(self._json_record(sample), reading)
        reading = replace(reading, preprocess=None)
        pair = is_preference(record)
        if task == "any":
            task = "classify" if is_classification(record) and not pair else None
            task = "embedding" if is_retrieval(record) else task
        others = task is not None or pair or is_labelled(record)
        if others and reading.train_on not in (None, "all"):
            raise BadSample(
                f"train_on {reading.train_on!r} chooses turns of conversations to train on, and "
                "records for other tasks have none to choose: leave it out."
            )
        if task in ("embedding", "reranker"):
            read = parse_judgements if task == "reranker" else parse_retrieval
            return dict(read(record, sample.folder, reading))
        if task == "classify":
            return {"": parse_classification(record, sample.folder, reading, self._labels)}
        if task in ("pairs", "reward"):
            loss = "--loss dpo, simpo and orpo need"
            require_preference(record, "--task reward needs" if task == "reward" else loss)
        if pair:
            return dict(parse_pair(record, sample.folder, reading))
        parse = parse_labelled if is_labelled(record) else parse_record
        return {"": parse(record, sample.folder, reading)}

    def _json_record(self, sample: RawSample) -> Any:
        """Return the record in JSON's types, with the parts of a WebDataset sample filled in."""
        record = sample.record
        if isinstance(record, bytes):  # from a WebDataset, or read by `data check`
            record = parse_json(record)
        if sample.folder.parts:
            record = join_parts(sample.folder.parts, record)
        return record

    def plan(self, sample: RawSample, parsed: Conversation | Document | None = None) -> Plan:
        """Tokenise a sample and measure its media."""
        with time_limit(self._max_seconds):
            parsed = parsed or self.parse(sample)
            rendered = self._renderer.render(parsed)
            plan = self._planners[sample.source].plan(rendered)
        unused = (*rendered.unused, *plan.unused, *sample.folder.unused)
        target = getattr(parsed, "target", None)
        return replace(plan, target=target, unused=unused, spelt=rendered.spelt)

    def plan_each(
        self, sample: RawSample, task: Task | Literal["pairs"] | None = None
    ) -> dict[str, Plan]:
        """Tokenise the sequences of a record, by their names in :meth:`parse_each`."""
        parts = self.parse_each(sample, task=task)
        return {name: self.plan(sample, part) for name, part in parts.items()}

    def load_pixels(self, plan: Plan, source: int) -> Pixels:
        """Decode the images and videos of a plan from the data set with number `source`."""
        with time_limit(self._max_seconds):
            return self._pixels[source].load(plan.media)


def _with_limits(processor: Any, limits: MediaLimits) -> Any:
    """Return a copy of the processor with other budgets, or the processor itself if none is set."""
    if limits == MediaLimits():
        return processor
    limited = copy.copy(processor)
    limited.image_processor = copy.deepcopy(processor.image_processor)
    limited.video_processor = copy.deepcopy(processor.video_processor)
    limits.apply(limited)
    return limited


class PixelLoader:
    """A loader that decodes and resizes images and videos and cuts them into patches.

    They are normalised with its `scale` later; it is None if HF's processors normalise them,
    because images and videos do not have the same scale.
    """

    def __init__(self, processor: Any) -> None:
        self._images, self._videos = processor.image_processor, processor.video_processor
        self.scale = _common_scale(self._images, self._videos)
        # Passed only if needed: HF's processor validates each option.
        raw = {"do_rescale": False, "do_normalize": False}
        self._options: dict[str, Any] = {"return_tensors": "pt", **(raw if self.scale else {})}

    def load(self, media: list[PlannedMedia]) -> Pixels:
        """Decode the media of one sample."""
        images = [item for item in media if item.media.kind == "image"]
        videos = [item for item in media if item.media.kind == "video"]
        return Pixels(
            *_load_in_runs(images, self._load_images), *_load_in_runs(videos, self._load_videos)
        )

    def _options_for(self, items: list[PlannedMedia]) -> dict[str, Any]:
        """Return the options of a call for media of one size."""
        return self._options if items[0].size is None else {**self._options, "size": items[0].size}

    def _load_images(self, items: list[PlannedMedia]) -> tuple[Tensor, Tensor]:
        images = [load_image(item.media) for item in items]
        out = self._images(images=images, **self._options_for(items))
        return _require_expected_patches(items, out["pixel_values"], out["image_grid_thw"])

    def _load_videos(self, items: list[PlannedMedia]) -> tuple[Tensor, Tensor]:
        frames, metadata = [], []
        for item in items:
            assert item.metadata is not None
            decoded = load_frames(item.media, item.metadata.frames_indices)  # (F, H, W, 3)
            frames.append(torch.from_numpy(decoded).permute(0, 3, 1, 2))
            metadata.append(item.metadata)
        out = self._videos(
            videos=frames,
            video_metadata=metadata,
            do_sample_frames=False,
            input_data_format=ChannelDimension.FIRST,
            **self._options_for(items),
        )
        return _require_expected_patches(items, out["pixel_values_videos"], out["video_grid_thw"])


def _load_in_runs(
    items: list[PlannedMedia], load: Callable[[list[PlannedMedia]], tuple[Tensor, Tensor]]
) -> tuple[Tensor | None, Tensor | None]:
    """Load media of one ``size`` after another at once, since HF's processors take one a call."""
    loaded = [load(list(run)) for _, run in groupby(items, key=lambda item: item.size)]
    if len(loaded) < 2:
        return loaded[0] if loaded else (None, None)
    values, grids = zip(*loaded, strict=True)
    return torch.cat(values), torch.cat(grids)


def _common_scale(images: Any, videos: Any) -> PixelScale | None:
    """Return the scale of both processors; None unless both rescale and normalise alike."""
    settings = [
        (p.do_rescale, p.do_normalize, p.rescale_factor, tuple(p.image_mean), tuple(p.image_std))
        for p in (images, videos)
    ]
    rescales, normalizes, factor, mean, std = settings[0]
    if settings[0] != settings[1] or not (rescales and normalizes):
        return None
    # HF's own numbers, with the rescaling folded into the mean and the standard deviation.
    fused_mean, fused_std, _ = images._fuse_mean_std_and_rescale_factor(
        do_normalize=True, image_mean=mean, image_std=std, do_rescale=True, rescale_factor=factor
    )
    per_channel = images.temporal_patch_size * images.patch_size**2
    return PixelScale(
        fused_mean.repeat_interleave(per_channel), fused_std.repeat_interleave(per_channel)
    )


def _require_expected_patches(
    items: list[PlannedMedia], values: Tensor, grid: Tensor
) -> tuple[Tensor, Tensor]:
    """Return pixels and grid if they agree with the sizes that placeholders were counted from."""
    for item, patches in zip(items, grid.prod(1).tolist(), strict=True):
        if patches != item.patches:
            raise BadSample(
                f"{item.media.kind} {item.media.name} decodes to {patches} patches, but its header "
                f"promised {item.patches}. Write the file again."
            )
    return values, grid


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack by best-fit decreasing: the longest item first, each into the bin that it fills best.

    It needs at most 11/9 of the fewest bins possible, plus one (Johnson, "Near-optimal bin packing
    algorithms", 1973).

    Returns:
        The items' indices, bin by bin. Items within a bin, and bins by their first item, are in the
        order of `lengths`, so that packing does not sort training by length.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[item]
        place = bisect_left(rooms, (length, -1))
        if place == len(rooms):
            bins.append([item])
            room, index = capacity, len(bins) - 1
        else:
            room, index = rooms.pop(place)
            bins[index].append(item)
        insort(rooms, (room - length, index))
    return sorted(sorted(items) for items in bins)


_KEPT = (
    *("dataset", "buffer_size", "worker_config", "final_packer", "final_packer_stateless"),
    *("sample_encoder", "sample_encoder_stateless", "sample_encoder_failure_tolerance"),
    *("pre_packer_failure_tolerance", "final_packer_failure_tolerance"),
)
"""What it takes over from energon's own."""

EpochOf = Callable[[Any], int]
"""``(restore key) -> the sample's epoch``."""


class EpochPacking(PackingDataset):
    """A packing whose buffer holds one epoch, and at most the first sample of the next."""

    _savable_fields = (*PackingDataset._savable_fields, "buffer_size", "_size")

    def __init__(
        self,
        packing: PackingDataset,
        epoch_of: EpochOf,
        pre_packer: Callable[[list[Any]], list[list[Any]]],
    ) -> None:
        """Replace energon's packing; each buffer of one epoch's samples goes to `pre_packer`."""
        self._epoch_of, self._pack_epoch = epoch_of, pre_packer
        self._size = packing.buffer_size  # of a full buffer
        kept = {name: getattr(packing, name) for name in _KEPT}
        super().__init__(pre_packer=self._pack_first_epoch, **kept)

    def _fill_reading_buffer(self, source_iter: Iterator[Any], log_progress: bool = False) -> bool:
        """Read until the buffer is full or holds the first sample of the next epoch."""
        reading, packed = self._reading_buffer, self._pre_packing_buffer
        while not self._crosses_epochs(reading._restore_keys):
            if reading.len_worker() + packed.len_worker() >= self._size:
                break
            reading.append(next(source_iter))
        # Energon packs a buffer of this size only.
        self.buffer_size = max(1, reading.len_worker())
        return True

    def _crosses_epochs(self, keys: Sequence[Any]) -> bool:
        """Return whether the last of these samples is not of the first one's epoch."""
        return bool(keys) and self._epoch_of(keys[0]) != self._epoch_of(keys[-1])

    def _pack_first_epoch(self, samples: list[Any]) -> list[list[Any]]:
        """Pack the samples of one epoch; the first of the next goes back to the reading buffer."""
        keys = [get_sample_restore_key(sample) for sample in samples]
        count = len(samples) - self._crosses_epochs(keys)
        self._ended = count < len(samples)
        packs = self._pack_epoch(samples[:count])
        self._reading_buffer.extend(samples[count:])
        return packs
