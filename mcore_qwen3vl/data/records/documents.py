"""Documents: captions, plain text, and text interleaved with images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import KINDS, Media, MediaFolder, media_list, said_of_all
from mcore_qwen3vl.data.records.parsed import Document, weight_of

CAPTION_KEYS = ("caption", "text", "txt")


def read_interleaved(record: Mapping[str, Any], folder: MediaFolder) -> Document:
    """Read ``texts`` and ``images``: lists of equal length, with one of the two null at each place.

    Raises:
        BadSample: the record is malformed, and the message says how.
    """
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
        parts.append(text if image is None else folder.resolve("image", image))
    return _document(parts, record)


def read_caption(record: Mapping[str, Any], folder: MediaFolder) -> Document:
    """Read ``text``, ``caption`` or ``txt``, with images and videos before it.

    Raises:
        BadSample: the record is malformed, and the message says how.
    """
    text = next((record[key] for key in CAPTION_KEYS if record.get(key) is not None), None)
    if not isinstance(text, str):
        raise BadSample(f"{' or '.join(CAPTION_KEYS)} must be text.")
    parts: list[str | Media] = []
    said = said_of_all(record)
    for kind in KINDS:
        for reference in media_list(record, kind):
            parts.append(folder.resolve(kind, reference, said))
    return _document([*parts, text], record)


def _document(parts: list[str | Media], record: Mapping[str, Any]) -> Document:
    if not any(isinstance(part, str) and part.strip() for part in parts):
        raise BadSample("the document holds no text.")
    return Document(parts, weight_of(record))
