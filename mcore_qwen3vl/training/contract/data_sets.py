"""The row of the data sets: they hold what they held, or records were appended to them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3vl.converters.identify import hub_id_of
from mcore_qwen3vl.data.config import Source, parse_sources
from mcore_qwen3vl.data.content import content_of, content_of_file, digest_of_beginning
from mcore_qwen3vl.data.datasets import is_of_tars
from mcore_qwen3vl.training.arguments.settings import WHOLE, Settings
from mcore_qwen3vl.training.contract.rules import (
    Change,
    Notice,
    Steering,
    Values,
    values_before,
    values_now,
)

GROWN = "grown"
"""The name of what says whether data sets have grown: True, or why a run cannot go on so."""


def sources_of(settings: Settings) -> list[Source]:
    """Return the data sets that the command line names."""
    return parse_sources(settings.loop.training_data, settings.sources.reading)


def data_sets(settings: Settings) -> Values:
    """Return what is recorded of the data sets; reads a part of them."""
    return _content(sources_of(settings), "train", settings)


def _content(sources: Sequence[Source], split: str, settings: Settings) -> Values:
    trust = settings.data.trust_data
    found = [content_of(source.path, split=split, trust=trust) for source in sources]
    return {
        "content": [{"sizes": list(content.sizes), "digest": content.digest} for content in found],
        "names": [_name_of(source.path) for source in sources],
    }


def _name_of(path: Path) -> str:
    """Return the hub id of a data set in the Hugging Face cache, or the name of file or folder."""
    ids = (hub_id_of(folder, "datasets") for folder in (path, *path.absolute().parents))
    return next(filter(None, ids), path.name)


def files_of_loss(settings: Settings, sources: Sequence[Source] | None = None) -> Values:
    """Return what the loss reads beside data sets, by default those of the training.

    Reads a part of each :class:`.Sidecar`.
    """
    sidecar = settings.loss.sidecar(settings, settings.lora)
    if sidecar is None:
        return {"beside": []}
    sources = sources_of(settings) if sources is None else sources
    files = [sidecar.file_of(source.path) for source in sources]
    return {"beside": [[file.name, content_of_file(file).digest] for file in files]}


def validation(settings: Settings) -> Values:
    """Return what decides the loss of a validation, but for the model; reads a part of its data."""
    loop = settings.loop
    paths = loop.valid_data_path
    sources = parse_sources(paths, settings.sources.reading) if paths else []
    limited = bool(paths) and loop.eval_iters != WHOLE
    return {
        **_content(sources, "val", settings),
        "samples": loop.eval_iters * loop.eval_global_batch_size if limited else None,
        "micro_batch": loop.eval_micro_batch_size if settings.loss.exchanges else None,
        "mixture": readings_of(sources),
        **files_of_loss(settings, sources),
    }


def readings_of(sources: Sequence[Source]) -> list[Any]:
    """Return in types of JSON how the records of each data set are read."""
    found = []
    for source in sources:
        reading = asdict(source.reading)
        if reading["chat_template_kwargs"] is None:
            del reading["chat_template_kwargs"]  # as checkpoints of earlier versions have it
        found.append(json.loads(json.dumps([reading, asdict(source.limits)], default=str)))
    return found


def require_data_sets(values: Values) -> None:
    """Raise ValueError if recorded data sets cannot be compared."""
    content, names = values.get("content", []), values.get("names", [])
    for held in content:
        sizes, digest = held["sizes"], held["digest"]
        if not all(type(size) is int for size in sizes) or not isinstance(digest, str | None):
            raise ValueError(f"data sets: {held!r} is no content of one")
    if names and len(names) != len(content):
        raise ValueError(f"data sets: {len(names)} names of {len(content)} data sets")


def growth(
    settings: Settings, before: Values, now: Values, state: Mapping[str, Any] | None
) -> Values:
    """Return what is known of data sets that differ from those `before`, by the name GROWN.

    Nothing, if they hold other records. Reads a part of them. `state` is a rank's position in them.
    """
    was, is_now = before.get("content", []), now["content"]
    if was == is_now or len(was) != len(is_now):
        return {}
    sources = sources_of(settings)
    for source, held, holds in zip(sources, was, is_now, strict=True):
        beginning = held != holds and digest_of_beginning(source.path, held["sizes"])
        if held != holds and (beginning is None or beginning != held["digest"]):
            return {}
    return {GROWN: _why_not(settings, sources, state or {}) or True}


def _why_not(settings: Settings, sources: Sequence[Source], state: Mapping[str, Any]) -> str | None:
    """Return why a run cannot go on with data sets that have grown; None: it can."""
    if any(is_of_tars(source.path) for source in sources):
        return "each data worker reads tars of its own"
    has_weights = len(sources) > 1 and sources[0].epochs is None
    if settings.data.packing and (has_weights or not settings.data.balance):
        which = "data sets with weights" if has_weights else "--no-balance"
        return f"with {which}, packs that wait to be read do not say which epoch they end"
    if "history" not in state:
        return "the checkpoint is of an earlier version, which kept no numbers of records"
    return None


def say_data_sets(content: Any, values: Values) -> str:
    """Return data sets in words, given all values of the row."""
    names = values.get("names") or [f"data set {number}" for number in range(1, len(content) + 1)]
    return ", ".join(
        f"{name} ({sum(held['sizes']):,} bytes)" for name, held in zip(names, content, strict=True)
    )


def say_beside(files: Any, _: Values) -> str:
    """Return the files that a loss reads beside data sets in words, by name and content."""
    return ", ".join(f"{name} of content {str(digest)[:8]}" for name, digest in files) or "none"


@dataclass(frozen=True)
class OtherData:
    """Allows more records behind the others; refuses other ones, and says if the size is equal."""

    text = (
        "refused: a position in the data would name other records, so that some come twice and "
        "others never. Names, folders and times of files do not count. Allowed: appended records "
        "(lines of JSONL, further Parquet shards); an epoch in progress goes on with the records "
        "that it was drawn from, and the new ones come from the next epoch on. Of tars, and where "
        "packs have no common epochs, refused"
    )

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        (change,) = changes
        if _same_as_far_as_known(change.before, change.after):
            return
        grown = now.get(GROWN)
        if grown is True:
            yield Notice(
                row,
                f"{row}: {change.is_now} in place of {change.was}: records were appended. An epoch "
                "that has begun goes on without them, and they come from the next epoch on",
            )
            return
        sizes = [[held["sizes"] for held in side] for side in (change.before, change.after)]
        other = ", of the same size with other records or another order" * (sizes[0] == sizes[1])
        why = "the position in the data would name other records"
        if grown:
            other, why = ", to which records were appended", f"{grown}, so that {why}"
        text = (
            f"{row}: the run was begun on {change.was}, and this command names {change.is_now}"
            f"{other}: {why}. Give the data of the checkpoint"
        )
        yield Notice(row, f"{text}.", refused=True)


@dataclass(frozen=True)
class OtherValidation:
    """Allows another validation; the losses before it are none to compare with."""

    text = (
        "allowed: losses of other records cannot be compared, so the best step and the patience of "
        "`--early-stop-patience` are counted from here on. So they are where records are read "
        "otherwise, rows have another length, or the loss has other settings"
    )

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        if before["content"] and now["content"]:
            yield Notice(
                row,
                f"{row}: {values_now(changes)} in place of {values_before(changes)}: its losses "
                "are not compared with those before",
            )


def _same_as_far_as_known(before: Sequence[Values], now: Sequence[Values]) -> bool:
    """Return whether sizes agree; an earlier version kept no digest, and none of folders."""

    def same(was: Values, is_now: Values) -> bool:
        return was["digest"] is None and was["sizes"] in ([], is_now["sizes"])

    return len(before) == len(now) and all(map(same, before, now))
