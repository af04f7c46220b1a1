"""The media of one record, handed out to its placeholders in order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import Kind, Media, MediaFolder

_OF_RECORD = ("fps", "sample_fps", "min_pixels", "max_pixels")
_TAG = re.compile("<(image|video)>")


class Shelf:
    """A record's images and videos: a list or a single one, under the plural or singular key.

    Raises:
        BadSample: both keys are given, or audio, which the model does not take.
    """

    def __init__(self, record: Mapping[str, Any], folder: MediaFolder) -> None:
        self._folder = folder
        self._said = said_of_all(record)
        self._left = {kind: media_list(record, kind) for kind in ("image", "video")}
        self._given = {kind: len(left) for kind, left in self._left.items()}
        self.media: list[Media] = []
        for key in ("audio", "audios"):
            if record.get(key):
                raise BadSample(f"{key} is given, and Qwen3-VL takes images and videos only.")

    def take(
        self, kind: Kind, reference: Any = None, said: Mapping[str, Any] | None = None
    ) -> None:
        """Add an image or video to the sample.

        Args:
            kind: image or video.
            reference: its location; None: the next unused entry of the record's list.
            said: keys of its part of the message, such as ``fps``. They override the record's keys.

        Raises:
            BadSample: the record's list has no entry left, or the reference is unusable.
        """
        if reference is None:
            if not self._left[kind]:
                raise BadSample(
                    f"there are more {kind} placeholders than the {self._given[kind]} given in "
                    f"{kind}s."
                )
            reference = self._left[kind].pop(0)
        self.media.append(self._folder.resolve(kind, reference, {**self._said, **(said or {})}))

    def split_tags(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield parts for the template: ``<image>`` and ``<video>`` tags, and the text between."""
        end = 0
        for tag in _TAG.finditer(text):
            if tag.start() > end:
                yield {"type": "text", "text": text[end : tag.start()]}
            kind: Kind = "image" if tag.group(1) == "image" else "video"
            self.take(kind)
            yield {"type": kind}
            end = tag.end()
        if end < len(text):
            yield {"type": "text", "text": text[end:]}

    def check_empty(self) -> None:
        """Raise if media are left over.

        Raises:
            BadSample: media are given that no placeholder uses.
        """
        for kind, left in self._left.items():
            if left:
                raise BadSample(
                    f"{self._given[kind]} {kind}s are given, but only "
                    f"{self._given[kind] - len(left)} {kind} placeholders use them."
                )


def said_of_all(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says of all its media: keys that have no other meaning in a record."""
    return {key: record[key] for key in _OF_RECORD if record.get(key) is not None}


def media_list(record: Mapping[str, Any], kind: str) -> list[Any]:
    """Return, as a list, the values of ``images`` or ``image`` (or of ``videos`` or ``video``)."""
    many, one = record.get(f"{kind}s"), record.get(kind)
    if many is not None and one is not None:
        raise BadSample(f"both {kind} and {kind}s are given; keep one of them.")
    given = one if many is None else many
    if given is None or given == "":
        return []
    return list(given) if isinstance(given, list) else [given]
