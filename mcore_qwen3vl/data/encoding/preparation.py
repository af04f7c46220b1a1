"""From a record to tokens and pixels, as the run and the record's own data set say."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mcore_qwen3vl.data.config import DataConfig, MediaLimits
from mcore_qwen3vl.data.encoding.pixels import PixelLoader, Pixels
from mcore_qwen3vl.data.encoding.planning import Plan, Planner
from mcore_qwen3vl.data.encoding.samples import RawSample
from mcore_qwen3vl.data.loading.datasets import SOURCE, dataset_path
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import join_parts, parse_record, preprocessed
from mcore_qwen3vl.data.records.parsed import Conversation, Document
from mcore_qwen3vl.data.records.preference import is_pair, parse_pair
from mcore_qwen3vl.data.records.reading import Reading, find_hook
from mcore_qwen3vl.data.records.template import Rendered, Renderer
from mcore_qwen3vl.data.records.time_limit import time_limit
from mcore_qwen3vl.untrusted import parse_json

_FILES = (".jsonl", ".json", ".parquet")


class Preparation:
    """What every worker does with a sample of any of the data sets.

    Attributes:
        scale: that pixels are still to be normalised with, as :class:`PixelLoader` has it.
    """

    def __init__(self, processor: Any, config: DataConfig, sources: Sequence[Source]) -> None:
        """
        Args:
            processor: HF ``Qwen3VLProcessor``; its budgets are changed as `config` says.
            config: lengths, policies and budgets.
            sources: the data sets, by their numbers.

        Raises:
            BadInput: a hook cannot be imported, or a budget is empty.
        """
        config.media.apply(processor)
        self._max_seconds = config.max_sample_seconds
        self._sources = list(sources)
        self._renderer = Renderer(processor, config.document_end)
        processors = [_limited(processor, source.limits) for source in self._sources]
        self._planners = [Planner(one, config) for one in processors]
        self._pixels = [PixelLoader(one) for one in processors]
        self.scale = self._pixels[0].scale
        for source in self._sources:
            if source.reading.preprocess is not None:
                find_hook(source.reading.preprocess)

    def folder(self, sample: Any) -> MediaFolder:
        """Where the media of one of energon's crude samples are."""
        root = self._sources[sample["__subflavors__"][SOURCE]].media_root
        if root is None:
            root = dataset_path(sample)
            root = root.parent if root.suffix in _FILES and not root.is_dir() else root
        parts = {name: part for name, part in sample.items() if not name.startswith("__")}
        parts.pop("json", None)
        return MediaFolder(root=root, parts=parts)

    def parse(self, sample: RawSample) -> Conversation | Document:
        """
        Raises:
            BadSample: the record is malformed. A hook may raise anything.
        """
        with time_limit(self._max_seconds):
            return parse_record(self._record(sample), sample.folder, self._reading(sample))

    def parse_each(self, sample: RawSample) -> tuple[Conversation | Document, ...]:
        """What :meth:`parse` gives, or the chosen and the rejected of a preference record.

        Raises:
            BadSample: the record is malformed. A hook may raise anything.
        """
        reading = self._reading(sample)
        with time_limit(self._max_seconds):
            record = preprocessed(self._record(sample), reading)
        made = replace(reading, preprocess=None)
        if not is_pair(record):
            return (parse_record(record, sample.folder, made),)
        pair = parse_pair(record, sample.folder, made)
        return pair.chosen, pair.rejected

    def _record(self, sample: RawSample) -> Any:
        """In JSON's types, as it is read."""
        record = sample.record
        if isinstance(record, bytes):  # of a WebDataset, or what `data check` reads
            record = parse_json(record)
        if sample.folder.parts:
            record = join_parts(sample.folder.parts, record)
        return record

    def _reading(self, sample: RawSample) -> Reading:
        return self._sources[sample.source].reading

    def render(self, parsed: Conversation | Document) -> Rendered:
        """
        Raises:
            BadSample: the template refuses the messages.
        """
        return self._renderer.render(parsed)

    def plan(self, sample: RawSample, parsed: Conversation | Document | None = None) -> Plan:
        """
        Args:
            sample: as read.
            parsed: it, or one of :meth:`parse_each`, if that was called already.

        Raises:
            BadSample, OverlongSample: the sample cannot be used.
        """
        with time_limit(self._max_seconds):
            rendered = self.render(parsed or self.parse(sample))
            return self._planners[sample.source].plan(rendered)

    def pixels(self, plan: Plan, source: int) -> Pixels:
        """
        Raises:
            BadSample: a file is corrupt, or decoding takes too long.
        """
        with time_limit(self._max_seconds):
            return self._pixels[source].load(plan.media)


def _limited(processor: Any, limits: MediaLimits) -> Any:
    """A processor with other budgets, or the same one."""
    if limits == MediaLimits():
        return processor
    own = copy.copy(processor)
    own.image_processor = copy.deepcopy(processor.image_processor)
    own.video_processor = copy.deepcopy(processor.video_processor)
    limits.apply(own)
    return own
