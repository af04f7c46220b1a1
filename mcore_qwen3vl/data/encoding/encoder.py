"""The pipeline as energon runs it, in data workers: cook, plan, choose, decode, batch.

Samples are planned (tokenised and measured) before the packing buffer and decoded after it, so
that the buffer holds tokens and file names, not pixels, and is cheap to rebuild on resume.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
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
from mcore_qwen3vl.data.encoding.pixels import PixelLoader
from mcore_qwen3vl.data.encoding.planning import Plan, Planner
from mcore_qwen3vl.data.encoding.samples import EncodedSample, PlannedSample, RawSample
from mcore_qwen3vl.data.loading.stand_in import origin
from mcore_qwen3vl.data.records.bad_samples import BadSampleGuard, sample_id
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import parse_parts, parse_record
from mcore_qwen3vl.data.records.template import Renderer


@stateless
def cook(sample: CrudeSample) -> RawSample:
    """Energon's crude sample, of JSONL or WebDataset, with the place its media are at."""
    dataset = origin(Path(str(sample["__sources__"][0].dataset_path)))
    parts = {name: part for name, part in sample.items() if not name.startswith("__")}
    record = parts.pop("json", None)
    root = dataset.parent if dataset.suffix == ".jsonl" else dataset
    return RawSample(
        **basic_sample_keys(sample), record=record, folder=MediaFolder(root=root, parts=parts)
    )


def plan_sample(renderer: Renderer, planner: Planner, sample: RawSample) -> Plan:
    """From a raw record to tokens; raises BadSample or OverlongSample."""
    record = sample.record
    if isinstance(record, bytes):  # of a WebDataset; energon parses JSONL itself
        record = json.loads(record)
    folder = sample.folder
    parsed = (
        parse_parts(folder.parts, folder, record) if folder.parts else parse_record(record, folder)
    )
    return planner.plan(renderer.render(parsed))


class Qwen3VLTaskEncoder(TaskEncoder[RawSample, EncodedSample, Batch, Batch]):
    """Energon's hooks; each is deterministic, so that energon can redo it on resume."""

    cookers = (Cooker(cook),)
    decoder = None  # WebDataset parts stay bytes

    def __init__(self, architecture: Architecture, processor: Any, config: DataConfig) -> None:
        """
        Args:
            architecture: the model's shape.
            processor: HF ``Qwen3VLProcessor``; its budgets are changed as `config` says.
            config: lengths and policies.
        """
        config.media.apply(processor)
        self.config = config
        self.guard = BadSampleGuard(config.max_bad_fraction, config.bad_fraction_floor)
        self.renderer = Renderer(processor, config.document_end)
        self.planner = Planner(processor, config)
        self._pixels = PixelLoader(processor)
        pad_id = processor.tokenizer.pad_token_id
        self._batcher = Batcher(architecture, config, pad_id, self._pixels.scale)

    @stateless
    def preencode_sample(self, sample: RawSample) -> PlannedSample:
        """Tokenise and measure."""
        with self.guard.skipping(sample):
            plan = plan_sample(self.renderer, self.planner, sample)
        return PlannedSample.derive_from(sample, plan=plan, name=sample_id(sample))

    def select_samples_to_pack(self, samples: list[PlannedSample]) -> list[list[PlannedSample]]:
        """Which samples of a full buffer share sequences."""
        lengths = [self.config.padded(len(sample.plan.input_ids)) for sample in samples]
        packs = best_fit(lengths, self.config.seq_length)
        return [[samples[index] for index in pack] for pack in packs]

    @stateless
    def postencode_sample(self, sample: PlannedSample) -> EncodedSample:
        """Decode the pixels."""
        with self.guard.skipping(sample):
            pixels = self._pixels.load(sample.plan.media)
        return EncodedSample.derive_from(
            sample,
            input_ids=sample.plan.token_tensor(),
            loss_weights=sample.plan.weight_tensor(),
            pixels=pixels,
            name=sample.name,
        )

    @stateless
    def pack_selected_samples(self, samples: list[EncodedSample]) -> Batch:
        """Packed batches."""
        return self._batch(self._batcher.pack, samples)

    @stateless
    def batch(self, samples: list[EncodedSample]) -> Batch:
        """Padded batches."""
        return self._batch(self._batcher.pad, samples)

    def _batch(self, assemble: Callable[..., Batch], samples: list[EncodedSample]) -> Batch:
        if not samples:  # the pixels of all of them were bad
            raise SkipSample
        skipped, dropped = self.guard.take()
        return assemble(samples, skipped, dropped)
