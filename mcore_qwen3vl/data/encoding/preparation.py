"""What is done with one record, by the settings of the run and of its data set."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.energon import CrudeSample, Sample, basic_sample_keys, edataclass

from mcore_qwen3vl.data.config import DataConfig, MediaLimits, Source
from mcore_qwen3vl.data.datasets import SOURCE
from mcore_qwen3vl.data.encoding.pixels import PixelLoader
from mcore_qwen3vl.data.encoding.planning import Pixels, Plan, Planner
from mcore_qwen3vl.data.encoding.rendering import Renderer
from mcore_qwen3vl.data.indexes import origin
from mcore_qwen3vl.data.record_form import RecordForm
from mcore_qwen3vl.data.records.documents import Document
from mcore_qwen3vl.data.records.hooks import find_hook, preprocess_record
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import join_parts, parse_record
from mcore_qwen3vl.data.records.reading import (
    Observed,
    parse_template_kwargs,
    record_limit,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.json_and_yaml import parse_json


@edataclass
class RawSample(Sample):
    """A record as read, before it is parsed."""

    record: Any
    folder: MediaFolder
    source: int  # number of its data set


_FILES = (".jsonl", ".json", ".parquet")


class Preparation:
    """The steps that every worker applies to a sample of any of the data sets."""

    def __init__(self, processor: Any, config: DataConfig, sources: Sequence[Source]) -> None:
        """Set the budgets on `processor`, and import the hooks; raise BadInput if either fails."""
        as_loaded = _with_own_media(processor)
        config.media_limits.apply(processor)
        self._max_seconds = config.max_sample_seconds
        self._sources = list(sources)
        self.template_arguments = [
            parse_template_kwargs(source.reading.chat_template_kwargs) for source in self._sources
        ]
        """Arguments of the chat template, by the number of the data set."""
        self._renderer = Renderer(
            processor, config.document_end, allow_dropped=config.allow_dropped
        )
        processors = [
            _with_limits(as_loaded, source, config.media_limits)
            if source.limits != MediaLimits()
            else processor
            for source in self._sources
        ]
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
        with record_limit(self._max_seconds):
            return parse_record(
                self._json_record(sample), sample.folder, self._sources[sample.source].reading
            )

    def parse_each(self, sample: RawSample, form: RecordForm) -> dict[str, Conversation | Document]:
        """Parse a record of some form into its sequences, by name; see :meth:`.RecordForm.read`."""
        reading = self._sources[sample.source].reading
        with record_limit(self._max_seconds):
            record = preprocess_record(self._json_record(sample), reading)
            return dict(form.read(record, sample.folder, replace(reading, preprocess=None)))

    def _json_record(self, sample: RawSample) -> Any:
        """Return the record in JSON's types, with the parts of a WebDataset sample filled in."""
        record = sample.record
        if isinstance(record, bytes):  # from a table it is an object already
            record = parse_json(record, unique=True)
        if sample.folder.parts:
            record = join_parts(sample.folder.parts, record)
        return record

    def plan(self, sample: RawSample, parsed: Conversation | Document | None = None) -> Plan:
        """Tokenise a sample and measure its media."""
        with record_limit(self._max_seconds):
            parsed = parsed or self.parse(sample)
            arguments = self.template_arguments[sample.source]
            rendered = self._renderer.render(parsed, arguments)
            plan = self._planners[sample.source].plan(rendered)
        unused = (*rendered.unused, *plan.unused, *sample.folder.unused)
        target = getattr(parsed, "target", None)
        return replace(plan, target=target, unused=unused, spelt=rendered.spelt)

    def plan_each(self, sample: RawSample, form: RecordForm) -> dict[str, Plan]:
        """Tokenise the sequences of a record, by their names in :meth:`parse_each`."""
        parts = self.parse_each(sample, form)
        return {name: self.plan(sample, part) for name, part in parts.items()}

    def load_pixels(self, plan: Plan, source: int) -> Pixels:
        """Decode the images and videos of a plan from the data set with number `source`."""
        with record_limit(self._max_seconds):
            return self._pixels[source].load(plan.media)


def _with_own_media(processor: Any) -> Any:
    """Return a copy of a processor whose processors of images and videos are its own."""
    own = copy.copy(processor)
    own.image_processor = copy.deepcopy(processor.image_processor)
    own.video_processor = copy.deepcopy(processor.video_processor)
    return own


def _with_limits(processor: Any, source: Source, of_run: MediaLimits) -> Any:
    """Return a copy of a processor with the budgets of a data set over those of the run."""
    limited = _with_own_media(processor)
    try:
        source.limits.over(of_run).apply(limited)
    except BadInput as error:
        raise BadInput(f"The data set {source.path}: {error}") from None
    return limited
