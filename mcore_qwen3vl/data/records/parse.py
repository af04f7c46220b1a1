"""One record of a data set, checked: a conversation to fine-tune on, or a document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_qwen3vl.data.records.bad_samples import BadSample
from mcore_qwen3vl.data.records.media import Kind, Media, MediaFolder

_TAG = re.compile("<(image|video)>")
_REFERENCE_KEYS = {
    "image": ("image", "path", "url", "image_url", "bytes", "base64"),
    "video": ("video", "path", "url", "video_url", "bytes", "base64"),
}
_CAPTION_KEYS = ("caption", "text", "txt")
_IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
_VIDEO_SUFFIXES = ("mp4", "mkv", "webm", "mov", "avi")


@dataclass(frozen=True)
class Conversation:
    """Chat messages in the form HF chat templates read, with their media in order."""

    messages: list[dict[str, Any]]
    media: list[Media]
    weights: list[float]  # one a message; 0 for all but assistant turns
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Document:
    """Interleaved text and media, all of whose text is trained."""

    parts: list[str | Media]
    weight: float = 1.0

    @property
    def media(self) -> list[Media]:
        return [part for part in self.parts if isinstance(part, Media)]


def parse_record(record: Any, folder: MediaFolder) -> Conversation | Document:
    """Read a JSON record.

    Args:
        record: with ``messages`` (a conversation); or ``texts`` and ``images`` of one length,
            where one of the two is null at each place (an interleaved document); or ``text`` (or
            ``caption``), with or without ``image``/``images``, which precede the text.
        folder: where the media are.

    Raises:
        BadSample: the record is malformed, and the message says how.
    """
    if not isinstance(record, Mapping):
        raise BadSample(f"a record must be a JSON object, this is {type(record).__name__}.")
    if {"chosen", "rejected"} & record.keys():
        raise BadSample("it is a preference record: --loss dpo trains on these.")
    if "messages" in record:
        return _conversation(record, folder)
    if "texts" in record:
        return _interleaved(record, folder)
    return _caption(record, folder)


def parse_parts(parts: Mapping[str, Any], folder: MediaFolder, record: Any) -> Any:
    """Read a WebDataset sample: its ``json`` record, or an image or video with a ``txt`` caption.

    Raises:
        BadSample: the sample holds neither.
    """
    record = dict(record) if isinstance(record, Mapping) else {}
    if not {"messages", "texts"} & record.keys():
        for name in sorted(parts):
            kind = media_kind(name)
            if kind and f"{kind}s" not in record and kind not in record:
                record[kind] = name
        if "txt" in parts:
            record.setdefault("text", parts["txt"].decode("utf-8"))
    return parse_record(record, folder)


def media_kind(name: str) -> Kind | None:
    """What a file name's suffix says it is."""
    suffix = name.rsplit(".", 1)[-1].lower()
    if suffix in _IMAGE_SUFFIXES:
        return "image"
    return "video" if suffix in _VIDEO_SUFFIXES else None


class _Shelf:
    """The record's ``images`` and ``videos`` lists, handed out in order."""

    def __init__(self, record: Mapping[str, Any], folder: MediaFolder) -> None:
        self._folder = folder
        self._left = {kind: list(_as_list(record, kind)) for kind in ("image", "video")}
        self._given = {kind: len(left) for kind, left in self._left.items()}
        self.media: list[Media] = []

    def take(self, kind: Kind, reference: Any = None) -> None:
        """The next media of the sample: `reference`, or the next of the record's list."""
        if reference is None:
            if not self._left[kind]:
                raise BadSample(
                    f"there are more {kind} placeholders than the {self._given[kind]} given in "
                    f"{kind}s."
                )
            reference = self._left[kind].pop(0)
        self.media.append(self._folder.resolve(kind, reference))

    def check_empty(self) -> None:
        for kind, left in self._left.items():
            if left:
                raise BadSample(
                    f"{self._given[kind]} {kind}s are given, but only "
                    f"{self._given[kind] - len(left)} {kind} placeholders use them."
                )


def _as_list(record: Mapping[str, Any], kind: str) -> list[Any]:
    many = record.get(f"{kind}s")
    if many is None:
        return []
    return many if isinstance(many, list) else [many]


def _conversation(record: Mapping[str, Any], folder: MediaFolder) -> Conversation:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadSample("messages must be a list of at least one message.")
    shelf = _Shelf(record, folder)
    sample_weight = _weight(record)
    rendered, weights = [], []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadSample(f"message {index} must be an object with a role and content.")
        content = _content(message.get("content"), index, shelf)
        trained = message["role"] == "assistant"
        if trained and _is_empty(content) and not message.get("tool_calls"):
            raise BadSample(f"message {index}, an assistant turn, is empty.")
        extra = {k: v for k, v in message.items() if k not in ("content", "weight")}
        rendered.append({**extra, "content": content})
        weights.append(_weight(message) * sample_weight if trained else 0.0)
    shelf.check_empty()
    if not any(weights):
        raise BadSample("no assistant turn has a weight above 0, so nothing would be trained.")
    return Conversation(rendered, shelf.media, weights, record.get("tools"))


def _content(content: Any, index: int, shelf: _Shelf) -> str | list[dict[str, Any]]:
    """Content for the template; strings stay strings unless they hold media tags."""
    if content is None:
        return ""
    if isinstance(content, str):
        parts = list(_split_tags(content, shelf))
        return content if all(part["type"] == "text" for part in parts) else parts
    if not isinstance(content, list):
        raise BadSample(f"message {index}: content is {type(content).__name__}, not text or parts.")
    return [_part(part, index, shelf) for part in content]


def _split_tags(text: str, shelf: _Shelf) -> Iterator[dict[str, Any]]:
    end = 0
    for tag in _TAG.finditer(text):
        if tag.start() > end:
            yield {"type": "text", "text": text[end : tag.start()]}
        kind: Kind = "image" if tag.group(1) == "image" else "video"
        shelf.take(kind)
        yield {"type": kind}
        end = tag.end()
    if end < len(text):
        yield {"type": "text", "text": text[end:]}


def _part(part: Any, index: int, shelf: _Shelf) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    declared = part.get("type") if isinstance(part, Mapping) else None
    if declared == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = str(declared).removesuffix("_url")
    if kind not in _REFERENCE_KEYS:
        raise BadSample(f"message {index}: a part must be text, image or video, not {declared!r}.")
    reference = next((part[k] for k in _REFERENCE_KEYS[kind] if part.get(k) is not None), None)
    shelf.take("image" if kind == "image" else "video", reference)
    return {"type": kind}


def _is_empty(content: str | list[dict[str, Any]]) -> bool:
    if isinstance(content, str):
        return not content.strip()
    return all(part["type"] == "text" and not part["text"].strip() for part in content)


def _interleaved(record: Mapping[str, Any], folder: MediaFolder) -> Document:
    texts, images = record["texts"], record.get("images")
    if images is None:
        images = [None] * len(texts)
    if len(texts) != len(images):
        raise BadSample(f"texts has {len(texts)} entries and images {len(images)}; pad with null.")
    parts: list[str | Media] = []
    for index, (text, image) in enumerate(zip(texts, images, strict=True)):
        if (text is None) == (image is None):
            raise BadSample(f"entry {index}: exactly one of texts and images must be null.")
        parts.append(text if image is None else folder.resolve("image", image))
    return _document(parts, record)


def _caption(record: Mapping[str, Any], folder: MediaFolder) -> Document:
    text = next((record[key] for key in _CAPTION_KEYS if record.get(key) is not None), None)
    if not isinstance(text, str):
        raise BadSample("the record has none of messages, texts, text and caption.")
    parts: list[str | Media] = []
    for kind in ("image", "video"):
        for reference in [record[kind]] if record.get(kind) else _as_list(record, kind):
            parts.append(folder.resolve("image" if kind == "image" else "video", reference))
    return _document([*parts, text], record)


def _document(parts: list[str | Media], record: Mapping[str, Any]) -> Document:
    if not any(isinstance(part, str) and part.strip() for part in parts):
        raise BadSample("the document holds no text.")
    return Document(parts, _weight(record))


def _weight(holder: Mapping[str, Any]) -> float:
    weight = holder.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e6:
        raise BadSample(f"weight is {weight!r}; a number of at least 0 is needed.")
    return float(weight)
