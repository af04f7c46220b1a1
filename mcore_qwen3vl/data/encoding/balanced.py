"""The pipeline of :mod:`encoder` with balanced work: ranks pack together, read their own part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megatron.energon import CrudeSample, Sample, basic_sample_keys, edataclass, stateless
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.wrappers import PackingDataset

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.encoder import Qwen3VLTaskEncoder, Record
from mcore_qwen3vl.data.encoding.packing import Division, Measure, divide, extra_work
from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.loading.datasets import SOURCE
from mcore_qwen3vl.data.loading.index import sample_id
from mcore_qwen3vl.data.loading.measured import BAD, OVERLONG, MeasuredFactory, Size, Unusable
from mcore_qwen3vl.data.loading.measured import measure as measure_data
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.records.flaws import BadSample, OverlongSample, reason_of
from mcore_qwen3vl.model.flops import Trained


@edataclass
class MeasuredSample(Sample):
    """A sample that is not read yet: its number, and the size from which its work is computed."""

    data_set: int
    index: int
    size: Size | Unusable


_KEPT = (
    *("dataset", "buffer_size", "worker_config", "final_packer", "final_packer_stateless"),
    *("sample_encoder", "sample_encoder_stateless", "sample_encoder_failure_tolerance"),
    *("pre_packer_failure_tolerance", "final_packer_failure_tolerance"),
)
"""What a shared packing takes over from energon's own."""


class SharedPacking(PackingDataset):
    """A stream of packs in the same order on all ranks, which take them in turn.

    A rank drops the packs of the others unread. Samples that the packer leaves over go back into
    the reading buffer, whose content energon saves and restores. The order depends on the number of
    ranks at the start of the run, which is saved too. With another number of ranks, a run resumes
    with the very next pack (:func:`mcore_qwen3vl.data.loader_state.redistribute`).
    """

    _savable_fields = (
        *PackingDataset._savable_fields,
        *("buffer_size", "_width", "_rows_per_step", "_carried"),
        *("_place", "_base", "_taken", "_giving"),
    )

    def __init__(
        self,
        packing: PackingDataset,
        divide: Callable[..., Division],
        *,
        rank: int,
        ranks: int,
        rows_per_step: int,
    ) -> None:
        """Replace energon's packing."""
        self._divide = divide
        self._rank, self._ranks = rank, ranks
        self._width, self._rows_per_step = ranks, rows_per_step
        kept = {name: getattr(packing, name) for name in _KEPT}
        super().__init__(pre_packer=self._take, **kept)

    def reset_state_own(self) -> None:
        super().reset_state_own()
        self._carried = 0  # first samples of the reading buffer that the last packing left over
        self._place = 0  # packs of all ranks that have left the buffer
        self._base = 0  # the pack from which these ranks take turns
        self._taken = 0  # packs that this rank has taken since then
        self._giving = False  # whether this rank's pack at `_place` is being delivered

    def _fill_reading_buffer(self, source_iter: Iterator[Any], log_progress: bool = False) -> bool:
        """Drop the other ranks' packs first; energon calls this before each pack it delivers."""
        dropped = self._advance(len(self._pre_packing_lengths))
        del self._pre_packing_buffer[: sum(self._pre_packing_lengths[:dropped])]
        del self._pre_packing_lengths[:dropped]
        filled: bool = super()._fill_reading_buffer(source_iter, log_progress)
        return filled

    def _take(self, samples: list[Any]) -> list[list[Any]]:
        """Return the packs of a full buffer, from this rank's first one on."""
        division = self._divide(
            samples, ranks=self._width, carried=self._carried, rows_per_step=self._rows_per_step
        )
        left = [samples[index] for index in division.left]
        self._carried = len(left)
        self._reading_buffer.extend(left)
        packs = [[samples[index] for index in pack] for row in division.rows for pack in row]
        return packs[self._advance(len(packs)) :]

    def _advance(self, waiting: int) -> int:
        """Move to this rank's next pack; return how many of the waiting packs come before it."""
        if self._giving:
            self._place += 1
            self._taken += 1
        ahead = self._base - self._place
        ahead = ahead + self._rank if ahead > 0 else (self._rank + ahead) % self._ranks
        dropped = min(ahead, waiting)
        self._place += dropped
        self._giving = dropped < waiting
        return dropped

    @staticmethod
    def go_on(state: dict[str, Any], offset: int, ranks: int) -> None:
        """Change a state, of `offset` delivered packs ago, so that any number of ranks can go on.

        `ranks` is the number that saved it.
        """
        state["_place"] += state["_giving"]
        state["_base"] += (state["_taken"] + state["_giving"] + offset) * ranks
        state["_taken"], state["_giving"] = 0, False


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
        num_workers: int,
        trained: Trained,
    ) -> None:
        """Prepare an encoder; :meth:`measured` must be called before samples are read."""
        super().__init__(architecture, processor, config, sources)
        self._architecture, self._trained = architecture, trained
        self._rank, self._ranks = dp_rank, dp_size
        self._rows_per_step = max(1, config.micro_batches // max(1, num_workers))
        self._data_sets: list[MeasuredFactory] = []
        self._settings = _settings(processor, config)
        self._sources = sources

    def measured(self, datasets: Sequence[LoadedDataset], processes: int) -> list[LoadedDataset]:
        """Return the data sets with stubs instead of samples; read all samples once if needed."""
        for number, one in enumerate(datasets):
            factory = MeasuredFactory(one.dataset, number)
            source = self._sources[factory.subflavors[SOURCE]]
            said = [self._settings, repr(source.reading), repr(source.limits)]
            measure_data(factory, self._size, json.dumps(said), processes)
            self._data_sets.append(factory)
            one.dataset = factory
        return list(datasets)

    def _size(self, sample: CrudeSample) -> Size | Unusable:
        try:
            return size_of(self.preparation.plan(self.preparation.raw(sample)))
        except Exception as error:  # as in the loader, any exception makes the sample bad
            (source,) = sample["__sources__"]
            kind = OVERLONG if isinstance(error, OverlongSample) else BAD
            return Unusable(kind, reason_of(error), source.shard_name, int(source.index))

    @stateless
    def cook(self, sample: CrudeSample) -> Any:
        """Return the stub of a sample."""
        own = {name: sample[name] for name in ("data_set", "index", "size")}
        return MeasuredSample(**basic_sample_keys(sample), **own)

    @stateless
    def preencode_sample(self, sample: Any) -> Any:
        """Leave out samples that cannot be used; all ranks meet them, and one counts each."""
        if isinstance(sample.size, Unusable):
            owner = sample.index % self._ranks
            with self.guard.skipping(sample, counted=owner == self._rank):
                error = OverlongSample if sample.size.kind == OVERLONG else BadSample
                raise error(sample.size.reason)
        return sample

    def build_batch(self, dataset: Any, **options: Any) -> Any:
        """Build energon's packing, shared by all ranks."""
        return SharedPacking(
            super().build_batch(dataset, **options),
            self._divide,
            rank=self._rank,
            ranks=self._ranks,
            rows_per_step=self._rows_per_step,
        )

    def _divide(self, samples: Sequence[Any], **options: int) -> Division:
        sizes = [sample.size for sample in samples]
        lengths = [self.config.padded(size.tokens) for size in sizes]
        works = [extra_work(self._architecture, size, self._trained) for size in sizes]
        return divide(list(map(Measure, lengths, works)), self.config.seq_length, **options)

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        """Read, tokenise and decode a sample."""
        with self.guard.skipping(sample):
            crude = self._data_sets[sample.data_set].read(sample.index)
            raw = self.preparation.raw(crude)
            plans = [self.preparation.plan(raw)]
        return super().postencode_sample(
            Record.derive_from(sample, plans=plans, source=raw.source, name=sample_id(crude))
        )


def size_of(plan: Plan) -> Size:
    """Return the size of a sample, from which its work is computed."""
    return Size(
        len(plan.input_ids),
        sum(item.patches for item in plan.media),
        sum(item.patches**2 / item.frames for item in plan.media),
    )


def _settings(processor: Any, config: DataConfig) -> str:
    """Return, as JSON, all settings that a sample's size depends on, besides its data set."""
    tokenizer = processor.tokenizer.backend_tokenizer.to_str()
    said = {
        "tokenizer": hashlib.sha256(tokenizer.encode()).hexdigest(),
        "template": processor.chat_template,
        "images": processor.image_processor.to_json_string(),
        "videos": processor.video_processor.to_json_string(),
        "media": asdict(config.media),
        "seq_length": config.seq_length,
        "overlong": config.overlong,
        "document_end": config.document_end,
        "allow_dropped": config.allow_dropped,
        "boundaries": "prompts and answers are tokenised apart",
    }
    return json.dumps(said, sort_keys=True, default=str)
