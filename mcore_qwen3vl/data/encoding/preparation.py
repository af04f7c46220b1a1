"""From a record to tokens and pixels, with the settings of the run and of the data set."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from megatron.energon import CrudeSample, Sample, basic_sample_keys, edataclass

from mcore_qwen3vl.data.config import DataConfig, MediaLimits, Task
from mcore_qwen3vl.data.encoding.pixels import PixelLoader, Pixels
from mcore_qwen3vl.data.encoding.planning import Plan, Planner
from mcore_qwen3vl.data.loading.datasets import SOURCE
from mcore_qwen3vl.data.loading.index import origin
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.records.flaws import BadSample, time_limit
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import Document, is_retrieval, join_parts, parse_record
from mcore_qwen3vl.data.records.preference import (
    is_labelled,
    is_pair,
    parse_labelled,
    parse_pair,
    require_pair,
)
from mcore_qwen3vl.data.records.reading import Observed, find_hook, preprocessed
from mcore_qwen3vl.data.records.tasks import (
    is_classification,
    parse_classification,
    parse_judgements,
    parse_retrieval,
)
from mcore_qwen3vl.data.records.template import Renderer
from mcore_qwen3vl.files import parse_json

_FILES = (".jsonl", ".json", ".parquet")


@edataclass
class RawSample(Sample):
    """A record as read, before it is parsed."""

    record: Any
    folder: MediaFolder
    source: int  # number of its data set


class Preparation:
    """The steps that every worker applies to a sample of any of the data sets."""

    def __init__(self, processor: Any, config: DataConfig, sources: Sequence[Source]) -> None:
        """Set the budgets on `processor`, prepare one for each data set, and import the hooks.

        Raises:
            BadInput: a hook cannot be imported, or a budget is empty.
        """
        config.media.apply(processor)
        self._max_seconds, self._labels = config.max_sample_seconds, config.labels
        self._sources = list(sources)
        self._renderer = Renderer(
            processor, config.document_end, allow_dropped=config.allow_dropped
        )
        processors = [_limited(processor, source.limits) for source in self._sources]
        self._planners = [Planner(one, config) for one in processors]
        self._pixels = [PixelLoader(one) for one in processors]
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
                self._record(sample), sample.folder, self._sources[sample.source].reading
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
            record = preprocessed(self._record(sample), reading)
        reading = replace(reading, preprocess=None)
        if task == "any":
            task = "classify" if is_classification(record) and not is_pair(record) else None
            task = "embedding" if is_retrieval(record) else task
        others = task is not None or is_pair(record) or is_labelled(record)
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
            require_pair(record, "--task reward needs" if task == "reward" else loss)
        if is_labelled(record) and not is_pair(record):
            return {"": parse_labelled(record, sample.folder, reading)}
        if not is_pair(record):
            return {"": parse_record(record, sample.folder, reading)}
        return dict(parse_pair(record, sample.folder, reading))

    def _record(self, sample: RawSample) -> Any:
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

    def pixels(self, plan: Plan, source: int) -> Pixels:
        """Decode the images and videos of a plan from the data set with number `source`."""
        with time_limit(self._max_seconds):
            return self._pixels[source].load(plan.media)


def _limited(processor: Any, limits: MediaLimits) -> Any:
    """Return a copy of the processor with other budgets, or the processor itself if none is set."""
    if limits == MediaLimits():
        return processor
    own = copy.copy(processor)
    own.image_processor = copy.deepcopy(processor.image_processor)
    own.video_processor = copy.deepcopy(processor.video_processor)
    limits.apply(own)
    return own
