"""Documents: text with images between, or with images and videos before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_qwen3vl.data.records.boxes import OBJECT_TAG, place_objects
from mcore_qwen3vl.data.records.media import (
    KINDS,
    TAG,
    Media,
    MediaFolder,
    RecordMedia,
    media_list,
    options_of_all,
    unused_of_lists,
)
from mcore_qwen3vl.data.records.nested import parse_nested
from mcore_qwen3vl.data.records.reading import BadSample, weight_of
from mcore_qwen3vl.unused.fields import Unused

CAPTION_KEYS = ("caption", "text", "txt")


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
    options = options_of_all(record)
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
        parts.append(text if image is None else folder.resolve("image", image, options))
    return _make_document(parts, record)


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
        media.check_all_used({})
        return _make_document(parts, record)
    options = options_of_all(record)
    for kind in KINDS:
        for reference in media_list(record, kind):
            parts.append(folder.resolve(kind, reference, options))
    return _make_document([*parts, text], record)


def _make_document(parts: list[str | Media], record: Mapping[str, Any]) -> Document:
    """Make a document; without media or objects, the tags for them are text like any other."""
    texts = [part for part in parts if isinstance(part, str)]
    if not any(text.strip() for text in texts):
        raise BadSample("the document holds no text.")
    unused = unused_of_lists(record)
    if any(map(OBJECT_TAG.search, texts)) and record.get("objects") is not None:
        images = [part for part in parts if isinstance(part, Media) and part.kind == "image"]
        texts, left = place_objects(texts, parse_nested(record["objects"], "objects"), images)
        unused += left
        rest = iter(texts)
        parts = [next(rest) if isinstance(part, str) else part for part in parts]
    tags = [tag for text in texts for tag in (*TAG.finditer(text), *OBJECT_TAG.finditer(text))]
    unused += [Unused("a document", tag[0], "trained as text") for tag in tags]
    return Document(parts, weight_of(record), unused=tuple(dict.fromkeys(unused)))
