"""Parsing of one record, whose format is recognised by its keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.grounding import TAGS, grounded
from mcore_qwen3vl.data.records.media import (
    KINDS,
    TAG,
    Kind,
    Media,
    MediaFolder,
    RecordMedia,
    media_list,
    options_of_all,
    unused_of_lists,
)
from mcore_qwen3vl.data.records.messages import (
    Conversation,
    read_conversations,
    read_messages,
    unpacked,
)
from mcore_qwen3vl.data.records.reading import PLAIN, Reading, observed, preprocessed, weight_of
from mcore_qwen3vl.unused import Unused

CAPTION_KEYS = ("caption", "text", "txt")
_IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
_VIDEO_SUFFIXES = ("mp4", "mkv", "webm", "mov", "avi")


@dataclass(frozen=True)
class Document:
    """Interleaved text and media, all of whose text is trained."""

    parts: list[str | Media]
    weight: float = 1.0
    format: str = field(default="", compare=False)  # format of the record
    unused: tuple[Unused, ...] = field(default=(), compare=False)

    @property
    def media(self) -> list[Media]:
        return [part for part in self.parts if isinstance(part, Media)]


Parsed = Conversation | Document


def read_interleaved(record: Mapping[str, Any], folder: MediaFolder) -> Document:
    """Read ``texts`` and ``images``: equally long lists, with one of the two null at each place."""
    texts, images = record["texts"], record.get("images")
    if not isinstance(texts, list) or not isinstance(images, list | None):
        raise BadSample("texts and images must be lists.")
    if images is None:
        images = [None] * len(texts)
    if len(texts) != len(images):
        raise BadSample(f"texts has {len(texts)} entries and images {len(images)}; pad with null.")
    parts: list[str | Media] = []
    for index, (text, image) in enumerate(zip(texts, images, strict=True)):
        if (text is None) == (image is None):
            raise BadSample(f"entry {index}: exactly one of texts and images must be null.")
        if image is None and not isinstance(text, str):
            raise BadSample(f"entry {index}: texts holds {type(text).__name__}, not text.")
        if image is None and any(images) and (tag := TAG.search(text)):
            raise BadSample(
                f"entry {index}: {tag[0]} in texts: the lists give the places of images, so take "
                "the tag out."
            )
        parts.append(text if image is None else folder.resolve("image", image))
    return _document(parts, record)


def read_caption(record: Mapping[str, Any], folder: MediaFolder) -> Document:
    """Read ``text``, ``caption`` or ``txt``, with images and videos before it."""
    text = next((record[key] for key in CAPTION_KEYS if record.get(key) is not None), None)
    if not isinstance(text, str):
        raise BadSample(f"{' or '.join(CAPTION_KEYS)} must be text.")
    parts: list[str | Media] = []
    if TAG.search(text) and any(media_list(record, kind) for kind in KINDS):
        media = RecordMedia(record, folder)
        for piece in media.split_tags(text):
            parts.append(piece["text"] if piece["type"] == "text" else media.media[-1])
        media.check_empty()
        return _document(parts, record)
    options = options_of_all(record)
    for kind in KINDS:
        for reference in media_list(record, kind):
            parts.append(folder.resolve(kind, reference, options))
    return _document([*parts, text], record)


def _document(parts: list[str | Media], record: Mapping[str, Any]) -> Document:
    """Make a document; without media or objects, the tags for them are text like any other."""
    texts = [part for part in parts if isinstance(part, str)]
    if not any(text.strip() for text in texts):
        raise BadSample("the document holds no text.")
    unused = unused_of_lists(record)
    if any(map(TAGS.search, texts)) and record.get("objects") is not None:
        images = [part for part in parts if isinstance(part, Media) and part.kind == "image"]
        texts, left = grounded(texts, unpacked(record["objects"], "objects"), images)
        unused += left
        rest = iter(texts)
        parts = [next(rest) if isinstance(part, str) else part for part in parts]
    tags = [tag for text in texts for tag in (*TAG.finditer(text), *TAGS.finditer(text))]
    unused += [Unused("a document", tag[0], "trained as text") for tag in tags]
    return Document(parts, weight_of(record), unused=tuple(dict.fromkeys(unused)))


@dataclass(frozen=True)
class Format:
    """A format of records."""

    name: str
    keys: tuple[str, ...]  # a record that has one of them is of this format
    read: Callable[[Mapping[str, Any], MediaFolder], Parsed]


FORMATS = (
    Format("messages", ("messages",), read_messages),
    Format("conversations", ("conversations",), read_conversations),
    Format("interleaved", ("texts",), read_interleaved),
    Format("caption", CAPTION_KEYS, read_caption),
)
"""The formats in order: a record has the first one of which it has a key."""


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


RETRIEVED = ("positive", "positive_messages")
"""Keys of retrieval records."""


def is_retrieval(record: Any) -> bool:
    """Return whether a JSON record is a retrieval record."""
    return isinstance(record, Mapping) and any(key in record for key in RETRIEVED)


def format_of(record: Mapping[str, Any], name: str | None = None) -> Format:
    """Return the format of a JSON record."""
    if {"chosen", "rejected"} & record.keys():
        raise BadSample(
            "it is a preference record: --loss dpo, simpo or orpo trains on these, and --task "
            "reward."
        )
    if is_retrieval(record):
        raise BadSample(
            "it is a retrieval record: --task embedding and --task reranker train on these."
        )
    for key, advice in OTHER_TASKS.items():
        given = record.get(key)
        if isinstance(given, bool) or (key != "label" and given):
            raise BadSample(f"{key} {advice}")
    offered = [one for one in FORMATS if name in (None, one.name)]
    for one in offered:
        if any(record.get(key) is not None for key in one.keys):
            return one
    wanted = ", ".join(key for one in offered for key in one.keys)
    raise BadSample(
        f"the record has the keys {', '.join(map(str, record))[:80]}; none of {wanted}, nor "
        "chosen, rejected (preference data), label that is true or false (--loss kto) or positive "
        "(retrieval data). For records of another kind, name a function that rewrites them: "
        "--preprocess MODULE:FUNCTION."
    )


def parse_record(record: Any, folder: MediaFolder, reading: Reading = PLAIN) -> Parsed:
    """Read a JSON record of any of :data:`FORMATS`."""
    record = preprocessed(record, reading)
    form = format_of(record, reading.format)
    parsed = observed(record, form.name, lambda seen: form.read(seen, folder))
    return _chosen(parsed, reading) if isinstance(parsed, Conversation) else parsed


def _chosen(parsed: Conversation, reading: Reading) -> Conversation:
    """Add the data set's system prompt, and choose the turns to train on."""
    weights = _chosen_weights(parsed, reading.train_on)
    if not any(weights):
        raise BadSample(f"train_on {reading.train_on!r} selects no assistant turn.")
    messages = reading.instructed(parsed.messages)
    weights = [0.0] * (len(messages) - len(weights)) + weights
    return replace(parsed, messages=messages, weights=weights)


def _chosen_weights(parsed: Conversation, train_on: str | None) -> list[float]:
    if train_on in (None, "all"):
        return parsed.weights
    if train_on == "last":
        last = max(i for i, m in enumerate(parsed.messages) if m["role"] == "assistant")
        return [weight if i == last else 0.0 for i, weight in enumerate(parsed.weights)]
    return [
        weight if re.search(train_on, _text(message)) else 0.0
        for message, weight in zip(parsed.messages, parsed.weights, strict=True)
    ]


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def join_parts(parts: Mapping[str, Any], record: Any) -> Any:
    """Return a WebDataset sample's record, with its media and caption filled in from its parts."""
    if record is not None and not isinstance(record, Mapping):
        return record
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
