"""The pipeline of :mod:`encoder` with balanced work: ranks pack together, read their own part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron.energon import CrudeSample, basic_sample_keys, stateless
from megatron.energon.metadataset.loader_interface import LoadedDataset

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.encoder import Qwen3VLTaskEncoder, raw_sample
from mcore_qwen3vl.data.encoding.packing import Division, Measure, divide
from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.encoding.samples import MeasuredSample, PlannedRecord
from mcore_qwen3vl.data.encoding.shared_packing import SharedPacking
from mcore_qwen3vl.data.loading.bad_samples import sample_id
from mcore_qwen3vl.data.loading.datasets import SOURCE
from mcore_qwen3vl.data.loading.measured import BAD, OVERLONG, MeasuredFactory, Size, Unusable
from mcore_qwen3vl.data.loading.measured import measure as measure_data
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.records.flaws import BadSample, OverlongSample
from mcore_qwen3vl.model import flops
from mcore_qwen3vl.model.flops import ALL, Trained


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
            return size_of(self.preparation.plan(raw_sample(self.preparation, sample)))
        except Exception as error:  # as in the loader, any exception makes the sample bad
            overlong = isinstance(error, OverlongSample)
            told = isinstance(error, OverlongSample | BadSample)
            (source,) = sample["__sources__"]
            return Unusable(
                OVERLONG if overlong else BAD,
                str(error) if told else f"{type(error).__name__}: {error}",
                source.shard_name,
                int(source.index),
            )

    @stateless
    def cook(self, sample: CrudeSample) -> Any:
        """Return the stub of a sample, with its size."""
        size = self._data_sets[sample["data_set"]].sizes[sample["index"]]
        return MeasuredSample(
            **basic_sample_keys(sample),
            data_set=sample["data_set"],
            index=sample["index"],
            size=size,
        )

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
        measures = [self._measure(sample.size) for sample in samples]
        return divide(measures, self.config.seq_length, **options)

    def _measure(self, size: Size) -> Measure:
        return Measure(
            self.config.padded(size.tokens), extra_work(self._architecture, size, self._trained)
        )

    @stateless
    def postencode_sample(self, sample: Any) -> Any:
        """Read, tokenise and decode a sample."""
        with self.guard.skipping(sample):
            crude = self._data_sets[sample.data_set].read(sample.index)
            raw = raw_sample(self.preparation, crude)
            plans = [self.preparation.plan(raw)]
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


def extra_work(architecture: Architecture, size: Size, trained: Trained = ALL) -> float:
    """Return the FLOPs of a sample, except those of its tokens' linear layers.

    Those cost the same in every pack, since every pack is padded to `seq_length`.
    """
    attention = flops.language(architecture, 0, float(size.tokens) ** 2, trained)
    return attention + flops.vision(architecture, size.patches, size.squared_frames, trained)


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
    }
    return json.dumps(said, sort_keys=True, default=str)
