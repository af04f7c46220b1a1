"""The parsed forms of a record: a conversation to fine-tune on, or a document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import Media


@dataclass(frozen=True)
class Conversation:
    """Chat messages in the form that HF chat templates read, with their media in order."""

    messages: list[dict[str, Any]]
    media: list[Media]
    weights: list[float]  # one a message; 0 for all but assistant turns
    tools: list[Any] | None = None
    prompt: bool = False  # rendered with the generation prompt, and not trained on
    target: float | tuple[float, ...] | None = None
    """A pair's margin, on the chosen side; the score of two texts, on the query; or 1 for each
    label of a classifier that is right, and 0 for others."""
    format: str = field(default="", compare=False)  # format of the record
    unread: tuple[str, ...] = field(default=(), compare=False)  # keys that were not read
    label: bool | None = None  # of a labelled record: whether the answer is wanted


@dataclass(frozen=True)
class Document:
    """Interleaved text and media, all of whose text is trained."""

    parts: list[str | Media]
    weight: float = 1.0
    format: str = field(default="", compare=False)  # format of the record
    unread: tuple[str, ...] = field(default=(), compare=False)  # keys that were not read

    @property
    def media(self) -> list[Media]:
        return [part for part in self.parts if isinstance(part, Media)]


Parsed = Conversation | Document


class _Observed(Mapping[str, Any]):
    """A record that remembers which of its keys were read."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._record[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


def observed[P: Conversation | Document](
    record: Mapping[str, Any], format: str, read: Callable[[Mapping[str, Any]], P]
) -> P:
    """Return what `read` makes of a record, with the format's name and the keys not read."""
    seen = _Observed(record)
    parsed: Any = read(seen)
    unread = (str(key) for key in record if key not in seen.read)
    made: P = replace(parsed, format=format, unread=(*unread, *parsed.unread))
    return made


def finite(holder: Mapping[str, Any], key: str) -> float:
    """Return the number under `key`."""
    value = holder[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise BadSample(f"{key} is {value!r:.40}; a number is needed.")
    return float(value)


def weight_of(holder: Mapping[str, Any], key: str = "weight") -> float:
    """Return the weight of a record or a message: ``weight``, or ms-swift's ``loss``; default 1."""
    weight = holder.get(key)
    if weight is None:
        return 1.0
    if key == "loss" and isinstance(weight, bool):
        return float(weight)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e6:
        switch = "true, false or " if key == "loss" else ""
        quoted = ", without quotes" if isinstance(weight, str) else ""
        raise BadSample(
            f"{key} is {weight!r:.40}: it takes {switch}a number from 0 to 1e6{quoted}."
        )
    return float(weight)
