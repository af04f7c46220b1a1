"""Data sets with known sample sizes: ranks pack them together, and each reads its part.

To balance work, every rank must know the sizes of all samples of a global batch, but read only its
own. With the sizes of :mod:`..sizes`, all ranks go through the same order of samples, by number.

The encoder is that of :mod:`.encoder`. Its samples are numbers and sizes until they are packed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from megatron.energon import (
    CrudeSample,
    Sample,
    SkipSample,
    basic_sample_keys,
    edataclass,
    stateless,
)
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.wrappers import PackingDataset

from mcore_qwen3vl import __version__
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, Source
from mcore_qwen3vl.data.content import digest_of_hook
from mcore_qwen3vl.data.datasets import SOURCE, NumberedSamples
from mcore_qwen3vl.data.encoding.division import Division, divide
from mcore_qwen3vl.data.encoding.encoder import PlannedRecord, Qwen3VLTaskEncoder
from mcore_qwen3vl.data.encoding.guard import IF_TOO_LONG, unusable_error
from mcore_qwen3vl.data.encoding.packing import EpochOf, EpochPacking
from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.indexes import origin
from mcore_qwen3vl.data.order import ABSENT, Order
from mcore_qwen3vl.data.places import sample_id
from mcore_qwen3vl.data.records.reading import BadSample, OverlongSample, is_momentary, reason_of
from mcore_qwen3vl.data.sizes import (
    BAD,
    NOTHING,
    OVERLONG,
    MeasuredFactory,
    Size,
    Unusable,
    load_or_measure_sizes,
    stamp_of,
    uneven_works,
)
from mcore_qwen3vl.model.flops import Trained


@edataclass
class MeasuredSample(Sample):
    """A sample that is not read yet: its number, and the size for computing its work."""

    data_set: int
    index: int
    size: Size | Unusable


class SharedPacking(EpochPacking):
    """A stream of packs in the same order on all ranks, which take them in turn.

    So do the data workers of a rank. Each drops the packs of the others unread. The packer's
    left-over samples go back into the reading buffer; energon saves and restores its content. The
    order depends on the number of ranks at the start of the run, which is saved too. With another
    number of ranks, a run resumes with the very next pack
    (:func:`mcore_qwen3vl.data.loader_state.redistribute`).
    """

    _savable_fields = (
        *EpochPacking._savable_fields,
        *("_width", "_rows_per_step", "_carried"),
        *("_place", "_base", "_taken", "_giving"),
    )

    def __init__(
        self,
        packing: PackingDataset,
        epoch_of: EpochOf,
        divide: Callable[..., Division],
        *,
        rank: int,
        ranks: int,
        workers: int,
        rows_per_step: int,
    ) -> None:
        """Replace energon's packing; `workers` of each rank share it too."""
        self._divide, self._workers = divide, workers
        self._rank, self._ranks = rank, ranks
        self._width, self._rows_per_step = ranks, rows_per_step
        self._start = 0
        super().__init__(packing, epoch_of, self._pack_for_worker)

    def start_at(self, pack: int) -> None:
        """Begin at a pack instead of the first, unless a state is restored."""
        self._start = self._base = pack

    def reset_state_own(self) -> None:
        super().reset_state_own()
        self._carried = 0  # first samples of the reading buffer that the last packing left over
        self._place = 0  # packs of all ranks that have left the buffer
        self._base = self._start  # the pack from which these ranks and their workers take turns
        self._taken = 0  # packs that this rank has taken since then
        self._giving = False  # whether this rank's pack at `_place` is being delivered

    def _fill_reading_buffer(self, source_iter: Iterator[Any], log_progress: bool = False) -> bool:
        """Drop the other ranks' packs first; energon calls this before each pack it delivers."""
        dropped = self._advance(len(self._pre_packing_lengths))
        del self._pre_packing_buffer[: sum(self._pre_packing_lengths[:dropped])]
        del self._pre_packing_lengths[:dropped]
        filled: bool = super()._fill_reading_buffer(source_iter, log_progress)
        return filled

    def _pack_for_worker(self, samples: list[Any]) -> list[list[Any]]:
        """Return the packs of a full buffer, from this worker's first one on."""
        rows, left = pack_into_rows(
            samples, self._divide, self._width, self._carried, self._rows_per_step, self._ended
        )
        self._carried = len(left)
        self._reading_buffer.extend(left)
        packs = [pack or [absent_sample(samples[0])] for row in rows for pack in row]
        return packs[self._advance(len(packs)) :]

    def _advance(self, waiting: int) -> int:
        """Move to this rank's next pack; return how many of the waiting packs come before it."""
        if self._giving:
            self._place += 1
            self._taken += 1
        # Rows are given to the workers in turn, as the loader asks them for batches.
        count, turn = self._ranks * self._workers, self._rank
        if self._workers > 1:
            turn += self.worker_config.rank_worker_id() * self._ranks
        # Packs before `_base` are taken already; from there on, every `count`-th is this worker's.
        ahead = self._base - self._place
        ahead = ahead + turn if ahead > 0 else (turn + ahead) % count
        dropped = min(ahead, waiting)
        self._place += dropped
        self._giving = dropped < waiting
        return dropped

    @staticmethod
    def take_turns_from(state: dict[str, Any], base: int) -> None:
        """Change a state so that any number of ranks can take turns from the pack `base` on."""
        state["_place"] += state["_giving"]
        state |= {"_base": base, "_taken": 0, "_giving": False}


def pack_into_rows(
    samples: list[Any],
    divide: Callable[..., Division],
    ranks: int,
    carried: int,
    rows_per_step: int,
    ended: bool,
) -> tuple[list[list[list[Any]]], list[Any]]:
    """Return the rows of packs of a buffer's samples, and those left for the next buffer.

    None are left if the epoch has `ended`; some of its last packs may then be empty.
    """
    rows: list[list[list[Any]]] = []
    if getattr(samples[0], "size", None) == NOTHING:
        return [
            [[sample] for sample in samples[at : at + ranks]]
            for at in range(0, len(samples), ranks)
        ], []
    while samples and (ended or not rows):
        division = divide(samples, ranks=ranks, carried=carried, rows_per_step=rows_per_step)
        rows += [[[samples[index] for index in pack] for pack in row] for row in division.rows]
        samples = [samples[index] for index in division.left]
        carried = len(samples)
    return rows, samples


def absent_sample(sample: MeasuredSample) -> MeasuredSample:
    """Return a sample without data that energon can restore, like `sample`."""
    key = (*sample.__restore_key__[:-1], ABSENT)
    return replace(sample, size=NOTHING, __restore_key__=key)


class BalancedTaskEncoder(Qwen3VLTaskEncoder):
    """An encoder whose ranks pack one shared buffer, and each read their own packs.

    Samples arrive as numbers and sizes; they are read after packing.
    """

    def __init__(
        self,
        architecture: Architecture,
        processor: Any,
        config: DataConfig,
        sources: Sequence[Source],
        *,
        dp_rank: int,
        dp_size: int,
        trained: Trained,
    ) -> None:
        """Prepare an encoder; :meth:`measure_data_sets` must be called before samples are read."""
        super().__init__(architecture, processor, config, sources)
        self._architecture, self._trained = architecture, trained
        self._multiple = config.length_multiple
        self._rank, self._ranks = dp_rank, dp_size
        self._measured: list[MeasuredFactory] = []
        self._settings = _settings_as_json(processor, config)
        self._sources = sources

    def measure_data_sets(
        self, datasets: Sequence[LoadedDataset], processes: int
    ) -> list[LoadedDataset]:
        """Return the data sets with stubs instead of samples; read all samples once if needed."""
        for number, dataset in enumerate(datasets):
            factory = MeasuredFactory(dataset.dataset, number)
            settings = self.settings_of(factory)
            load_or_measure_sizes(
                factory, self.measure_sample, self._stamp_of_sample, settings, processes
            )
            self._measured.append(factory)
            dataset.dataset = factory
        return list(datasets)

    def settings_of(self, factory: MeasuredFactory) -> str:
        """Return, as JSON, the settings that the sizes of a data set depend on."""
        source = self._sources[factory.subflavors[SOURCE]]
        hook = source.reading.preprocess
        limits = source.limits.over(self.config.media_limits)
        of_source = [repr(source.reading), repr(limits), hook and digest_of_hook(hook)]
        return json.dumps([self._settings, *of_source])

    def _look_for_usable(self, source: int) -> None:
        for factory in self._measured:
            if factory.subflavors[SOURCE] == source:
                every = range(factory.count)
                records = [n for n in every if isinstance(factory.sizes[n], Size)]
                read = partial(self._read_measured, factory)
                self._try_records(origin(factory.path), records, read)

    def _read_measured(self, factory: MeasuredFactory, index: int) -> Any:
        """Read and decode one sample; raise SkipSample if it cannot be used."""
        place = dict.fromkeys(("__key__", "__restore_key__"), "")
        size = factory.sizes[index]
        return self.postencode_sample(
            MeasuredSample(**place, data_set=factory.number, index=index, size=size)
        )

    def require_usable(self) -> None:
        """Raise BadInput if a measured data set has no usable sample."""
        for number, factory in enumerate(self._measured):
            used = range(factory.count)
            if self.data_sets:  # those of tars are not read by number
                start = self.data_sets[number].first
                used = range(start, start + len(self.data_sets[number]))
            if any(isinstance(factory.sizes[index], Size) for index in used):
                continue
            flaw: Any = factory.sizes[used[0]]
            first = f"record {flaw.number + 1} of {flaw.shard}: {flaw.reason}"
            first += f" {IF_TOO_LONG}" * (flaw.kind == OVERLONG)
            raise unusable_error(origin(factory.path), "all", first)

    def measure_sample(self, factory: MeasuredFactory, index: int) -> tuple[Size | Unusable, int]:
        """Return the size or the flaw of a sample, and the stamp of its media."""
        shard, number = factory.path.name, index  # all that is known of an unreadable one
        stamp = 0
        try:
            sample = factory.read_sample(index)
            if sample is None:
                return NOTHING, 0
            (source,) = sample["__sources__"]
            shard, number = source.shard_name, int(source.index)
            raw = self.preparation.raw(sample)
            parsed = self.preparation.parse(raw)
            stamp = stamp_of(parsed.media)
            return size_of(self.preparation.plan(raw, parsed)), stamp
        # As in the loader, any exception, such as that of a broken line, makes the sample bad.
        except Exception as error:
            kind = OVERLONG if isinstance(error, OverlongSample) else BAD
            return Unusable(kind, reason_of(error), shard, number, is_momentary(error)), stamp

    def _stamp_of_sample(self, factory: MeasuredFactory, index: int) -> int:
        """Return the stamp of a sample's media; 0 if it has none or cannot be read."""
        try:
            sample = factory.read_sample(index)
            if sample is None:
                return 0
            return stamp_of(self.preparation.parse(self.preparation.raw(sample)).media)
        except Exception:  # as above
            return 0

    @stateless
    def cook(self, sample: CrudeSample) -> Any:
        """Return the stub of a sample."""
        stub = {name: sample[name] for name in ("data_set", "index", "size")}
        return MeasuredSample(**basic_sample_keys(sample), **stub)

    @stateless
    def preencode_sample(self, sample: Any) -> Any:
        """Leave out samples that cannot be used; all ranks meet them, and one counts each."""
        if isinstance(sample.size, Unusable):
            owner = sample.index % self._ranks
            with self.guard.skip_bad_samples(sample, counted=owner == self._rank):
                error = OverlongSample if sample.size.kind == OVERLONG else BadSample
                raise error(sample.size.reason)
        return sample

    def read_and_plan(self, samples: NumberedSamples, raw: RawSampleData) -> Any:
        """Return the stub of a sample."""
        if not raw.data:
            empty = dict.fromkeys(("__key__", "__restore_key__"), "")
            return MeasuredSample(**empty, data_set=0, index=0, size=NOTHING)
        return super().read_and_plan(samples, raw)

    def build_batch(self, dataset: Any, **options: Any) -> Any:
        """Build the packing of tars; each worker reads shards of its own."""
        packing = super().build_batch(dataset, **options)
        workers = max(1, options["worker_config"].num_workers)
        return self._share_packs(
            packing, lambda key: 0, 1, max(1, self.config.micro_batches // workers)
        )

    def _pack_by_epoch(self, packing: Any, epoch_of: EpochOf) -> SharedPacking:
        workers = max(1, packing.worker_config.num_workers)
        return self._share_packs(packing, epoch_of, workers, self.config.micro_batches)

    def _share_packs(
        self, packing: Any, epoch_of: EpochOf, workers: int, rows: int
    ) -> SharedPacking:
        return SharedPacking(
            packing,
            epoch_of,
            self._divide,
            rank=self._rank,
            ranks=self._ranks,
            workers=workers,
            rows_per_step=rows,
        )

    def count_packs(self, order: Order, places: range, buffer: int, ranks: int) -> int:
        """Return the number of packs that `ranks` make of the records at these positions.

        The first of them begins an epoch, and `buffer` samples are packed at a time.
        """
        count, epoch, carried = 0, 0, 0
        waiting: list[Any] = []

        def pack_waiting(ended: bool) -> None:
            """Count the packs of the waiting samples, as a rank forms them; some may wait on."""
            nonlocal count, carried, waiting
            rows, waiting = pack_into_rows(
                waiting, self._divide, ranks, carried, self.config.micro_batches, ended
            )
            count, carried = count + len(rows) * ranks, len(waiting)

        for place in places:
            data_set, number = order[place]
            size = self._measured[data_set].sizes[self.data_sets[data_set].first + number]
            if isinstance(size, Unusable):
                continue
            # The first sample of an epoch ends the packs of the one before.
            before, epoch = epoch, order.epoch_of(place)
            if waiting and before != epoch:
                pack_waiting(ended=True)
            waiting.append(SimpleNamespace(size=size))
            if len(waiting) == buffer:
                pack_waiting(ended=False)
        if waiting:
            pack_waiting(ended=True)
        return count

    @property
    def measures(self) -> dict[str, Any]:
        """What packs are formed by, as plain data: what trains, and the multiple of lengths."""
        return {"trained": list(astuple(self._trained)), "length_multiple": self._multiple}

    def form_packs_by(self, measures: dict[str, Any]) -> None:
        """Form packs as a run did before, by its :attr:`measures`, so that none has other samples.

        Another part of the model may train now, or fewer ranks share a sample: packs are then less
        even, or less full, than they could be.
        """
        self._trained = Trained(*measures["trained"])
        self._multiple = measures["length_multiple"]

    def _divide(self, samples: Sequence[Any], **options: int) -> Division:
        sizes = [sample.size for sample in samples]
        tokens = np.array([size.tokens for size in sizes], np.int64)
        lengths = -(-tokens // self._multiple) * self._multiple
        works = uneven_works(self._architecture, sizes, self._trained)
        return divide(lengths, works, self.config.seq_length, **options)

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        """Read, tokenise and decode a sample."""
        if sample.size == NOTHING:
            raise SkipSample
        factory = self._measured[sample.data_set]
        with self.guard.skip_bad_samples(sample):
            crude = factory.read_sample(sample.index)
            raw = self.preparation.raw(crude)
            try:
                plans = [self.preparation.plan(raw)]
            except Exception:
                factory.forget_sizes()
                raise
            if (size := size_of(plans[0])) != sample.size:
                factory.forget_sizes()
                raise BadSample(
                    f"it has {size.tokens} tokens and {size.patches} patches, and had "
                    f"{sample.size.tokens} and {sample.size.patches} when it was measured: its "
                    "media or its hook have changed. The next start measures the data again."
                )
        return super().postencode_sample(
            PlannedRecord.derive_from(sample, plans=plans, source=raw.source, name=sample_id(crude))
        )


def size_of(plan: Plan) -> Size:
    """Return the size of a sample, from which its work is computed."""
    return Size(
        len(plan.input_ids),
        sum(item.patches for item in plan.media),
        sum(item.patches**2 / item.frames for item in plan.media),
    )


def _settings_as_json(processor: Any, config: DataConfig) -> str:
    """Return, as JSON, all settings that a sample's size depends on, besides its data set."""
    tokenizer = processor.tokenizer.backend_tokenizer.to_str()
    said = {
        "tokenizer": hashlib.sha256(tokenizer.encode()).hexdigest(),
        "template": processor.chat_template,
        "images": processor.image_processor.to_json_string(),
        "videos": processor.video_processor.to_json_string(),
        "media": asdict(config.media_limits),
        "seq_length": config.seq_length,
        "overlong": config.overlong,
        "document_end": config.document_end,
        "allow_dropped": config.allow_dropped,
        "max_decoded_pixels": config.max_decoded_pixels,
        "version": __version__,  # another one may read what this one cannot
        "boundaries": "prompts and answers are tokenised apart",
    }
    return json.dumps(said, sort_keys=True, default=str)
