"""Parsing of a record of any format: a conversation or a document.

A format is recognised by its keys. A data set's hook rewrites records of other kinds. Records for
other tasks are parsed by :mod:`mcore_qwen3vl.data.records.tasks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_qwen3vl.data.records.documents import (
    CAPTION_KEYS,
    Document,
    read_caption,
    read_interleaved,
)
from mcore_qwen3vl.data.records.hooks import preprocess_record
from mcore_qwen3vl.data.records.media import KINDS, Kind, MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation, read_conversations, read_messages
from mcore_qwen3vl.data.records.reading import PLAIN, BadSample, Reading, read_observed
from mcore_qwen3vl.data.records.trained_turns import select_turns

_IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
_VIDEO_SUFFIXES = ("mp4", "mkv", "webm", "mov", "avi")


Parsed = Conversation | Document


def parse_record(record: Any, folder: MediaFolder, reading: Reading = PLAIN) -> Parsed:
    """Read a JSON record of any of :data:`FORMATS`."""
    record = preprocess_record(record, reading)
    form = format_of(record, reading.format)
    parsed = read_observed(record, form.name, lambda seen: form.read(seen, folder))
    return select_turns(parsed, reading) if isinstance(parsed, Conversation) else parsed


def join_parts(parts: Mapping[str, Any], record: Any) -> Any:
    """Return a WebDataset sample's record, with its media and caption filled in from its parts."""
    if record is not None and not isinstance(record, Mapping):
        return record
    if record is None and (dotted := sorted(name for name in parts if name.endswith(".json"))):
        raise BadSample(
            f"its parts are {', '.join(dotted)[:200]}: in a tar, the name of a sample ends at its "
            "first dot, so that files with further dots in their names become one sample. Write "
            "the names with _ in place of those dots."
        )
    record = dict(record or {})
    if {"messages", "conversations", "texts", "chosen", "query", "completion"} & record.keys():
        return record
    for kind in KINDS:
        names = sorted(name for name in parts if media_kind(name) == kind)
        if names and f"{kind}s" not in record and kind not in record:
            record[f"{kind}s"] = names
    if "text" not in record and "txt" in parts:
        record["text"] = parts["txt"].decode("utf-8")
    return record


def media_kind(name: str) -> Kind | None:
    """Return the kind of media that a file name's suffix stands for; None if neither kind."""
    suffix = name.rsplit(".", 1)[-1].lower()
    if suffix in _IMAGE_SUFFIXES:
        return "image"
    return "video" if suffix in _VIDEO_SUFFIXES else None


@dataclass(frozen=True)
class RecordFormat:
    """A format of records."""

    name: str
    keys: tuple[str, ...]  # a record that has one of them is of this format
    read: Callable[[Mapping[str, Any], MediaFolder], Parsed]


FORMATS = (
    RecordFormat("messages", ("messages",), read_messages),
    RecordFormat("conversations", ("conversations",), read_conversations),
    RecordFormat("interleaved", ("texts",), read_interleaved),
    RecordFormat("caption", CAPTION_KEYS, read_caption),
)
"""The formats in order: a record has the first format with a key of the record."""


_PAIRED = (
    "belongs to preference data, of which this would train the first answer alone. --loss dpo, "
    "simpo or orpo trains on both, from chosen and rejected, which --preprocess MODULE:FUNCTION "
    "can write; without this key the answer is trained as any other."
)
PAIRED_ELSEWHERE = ("rejected_response", "rejected_messages", "rejected_images")
"""Keys of other programs' preference records."""
OTHER_TASKS = {
    **dict.fromkeys(PAIRED_ELSEWHERE, _PAIRED),
    "label": "is true or false, which tells wanted answers from unwanted ones: this would train "
    "both alike. --loss kto trains on such records; or take the key out of records to train on.",
}
"""Keys of records that are made for another task than training on their answers. ``label`` is one
only if it is true or false: data sets of other kinds have numbers and words there."""
SIDES = ("chosen", "rejected")


def is_preference(record: Mapping[str, Any]) -> bool:
    """Return whether a JSON record is a preference record, even one that lacks a side."""
    return any(side in record for side in SIDES)


RETRIEVED = ("positive", "positive_messages")
"""Keys of retrieval records."""


def is_retrieval(record: Mapping[str, Any]) -> bool:
    """Return whether a JSON record is a retrieval record."""
    return any(key in record for key in RETRIEVED)


def format_of(record: Mapping[str, Any], name: str | None = None) -> RecordFormat:
    """Return the format of a JSON record."""
    if is_preference(record):
        raise BadSample(
            "it is a preference record: --loss dpo, simpo or orpo trains on these, and --task "
            "reward."
        )
    if is_retrieval(record):
        raise BadSample(
            "it is a retrieval record: --task embedding and --task reranker train on these."
        )
    for key, advice in OTHER_TASKS.items():
        value = record.get(key)
        if isinstance(value, bool) or (key != "label" and value):
            raise BadSample(f"{key} {advice}")
    offered = [form for form in FORMATS if name in (None, form.name)]
    for form in offered:
        if any(record.get(key) is not None for key in form.keys):
            return form
    wanted = ", ".join(key for form in offered for key in form.keys)
    raise BadSample(
        f"the record has the keys {', '.join(map(str, record))[:80]}; none of {wanted}, nor "
        "chosen, rejected (preference data), label that is true or false (--loss kto) or positive "
        "(retrieval data). For records of another kind, name a function that rewrites them: "
        "--preprocess MODULE:FUNCTION."
    )
