"""Preference records: a shared beginning, and two continuations, of which one was chosen.

A record has ``chosen`` and ``rejected``, each in one of two forms:

- with ``messages``, which both share: the text of the last turn, a message, or a list of messages;
- without ``messages``: a whole conversation each. The messages that both begin with are shared.

A ``margin`` says by how much the chosen answer is better; reward models are trained with it.

Both use the record's images, videos and tools. Only assistant turns after the shared messages count
in the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import parse_record, preprocessed
from mcore_qwen3vl.data.records.parsed import Conversation, finite
from mcore_qwen3vl.data.records.reading import Reading

SIDES = ("chosen", "rejected")
PREFERENCE = "preference"
"""The name of the format."""


@dataclass(frozen=True)
class Pair:
    """Two conversations with the same beginning; weights are 1 for turns that count, else 0."""

    chosen: Conversation
    rejected: Conversation


def is_pair(record: Any) -> bool:
    """Return whether a JSON record is a preference record."""
    return isinstance(record, Mapping) and any(side in record for side in SIDES)


def parse_pair(record: Any, folder: MediaFolder, reading: Reading | None = None) -> Pair:
    """Read a preference record.

    Args:
        record: a record in a form that the module describes.
        folder: folder of the media.
        reading: how the data set's records are read; its `train_on` is ignored.

    Raises:
        BadSample: the record is malformed, and the message says how.
    """
    reading = reading or Reading()
    record = preprocessed(record, reading)
    missing = [side for side in SIDES if side not in record]
    if missing:
        raise BadSample(f"a preference record needs chosen and rejected; {missing[0]} is missing.")
    if record.get("weight") is not None:
        raise BadSample("a preference record has no weight: every pair counts the same.")
    shared = record.get("messages") or []
    if not isinstance(shared, list):
        raise BadSample("messages must be a list of messages.")
    sides = [[*shared, *_turns(record[side], side, alone=not shared)] for side in SIDES]
    rest = {k: v for k, v in record.items() if k not in (*SIDES, "messages", "margin")}
    if sides[0] == sides[1]:
        raise BadSample("chosen and rejected are the same.")
    common = _common(*sides)
    common += len(reading.instructed(sides[0])) - len(sides[0])
    chosen, rejected = (
        continued(rest, side, reading.instructed(messages), common, folder)
        for side, messages in zip(SIDES, sides, strict=True)
    )
    margin = 0.0 if record.get("margin") is None else finite(record, "margin")
    return Pair(replace(chosen, target=margin), rejected)


def _turns(value: Any, side: str, *, alone: bool) -> list[Any]:
    """Return the messages of a side, which is a whole conversation if `alone`."""
    if alone and not (isinstance(value, list) and value):
        raise BadSample(f"{side} must be a list of messages.")
    return turns_of(value, side, "assistant")


def turns_of(value: Any, name: str, role: str) -> list[Any]:
    """Return the messages that the value of key `name` stands for; a text is a message of `role`.

    Raises:
        BadSample: it is neither a text, nor a message, nor a list of messages.
    """
    if isinstance(value, list) and value:
        return value
    if not isinstance(value, str | Mapping):
        raise BadSample(f"{name} must be text, a message or a list of messages.")
    return [{"role": role, "content": value} if isinstance(value, str) else value]


def _common(chosen: list[Any], rejected: list[Any]) -> int:
    """Return how many messages at the beginning are the same in both."""
    pairs = zip(chosen, rejected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))


def continued(
    rest: Mapping[str, Any], side: str, messages: list[Any], common: int, folder: MediaFolder
) -> Conversation:
    """Read a conversation of which only the messages after the first `common` count in the loss.

    Args:
        rest: the record's other keys.
        side: the key of these messages, for errors.
        messages: all messages.
        common: number of messages that do not count.
        folder: folder of the media.

    Raises:
        BadSample: the messages are malformed, and the message says how.
    """
    try:
        parsed = parse_record({**rest, "messages": messages}, folder)
    except BadSample as error:
        raise BadSample(f"{side}: {error}") from error
    assert isinstance(parsed, Conversation)
    own = parsed.weights[common:]
    if set(own) - {0.0, 1.0}:
        raise BadSample(f"{side}: here a message's weight is 0 or 1.")
    if not any(own):
        raise BadSample(f"{side} has no assistant turn of its own, so nothing would be compared.")
    return replace(parsed, weights=[0.0] * common + own, format=PREFERENCE)
