"""Records with answers that are compared, or of which it is said whether they are wanted.

docs/preference.md shows their forms. Answers share the record's media, tools and first messages,
and only assistant turns after the shared messages count in the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import PAIRED_ELSEWHERE, parse_record
from mcore_qwen3vl.data.records.reading import PLAIN, Reading, number

SIDES = ("chosen", "rejected")
_LABEL, _PROMPT, _ANSWER = "label", "prompt", "completion"


def is_pair(record: Any) -> bool:
    """Return whether a JSON record is a preference record."""
    return isinstance(record, Mapping) and any(side in record for side in SIDES)


def require_pair(record: Any, owner: str) -> None:
    """Raise BadSample unless it is a preference record; `owner` is who needs one, with the verb."""
    if is_pair(record):
        return
    needs = f"{owner} chosen and rejected"
    other = isinstance(record, Mapping) and next(filter(record.get, PAIRED_ELSEWHERE), None)
    if other:
        raise BadSample(
            f"{other} is another program's key of preference records, and {needs}, which "
            "--preprocess MODULE:FUNCTION can write."
        )
    raise BadSample(f"it is not a preference record: {needs}.")


def is_labelled(record: Any) -> bool:
    """Return whether a JSON record is a labelled record."""
    return isinstance(record, Mapping) and isinstance(record.get(_LABEL), bool)


def parse_pair(
    record: Mapping[str, Any], folder: MediaFolder, reading: Reading = PLAIN
) -> dict[str, Conversation]:
    """Read a preference record.

    The data set's hook has been applied; of `reading` only the system prompt counts.

    Returns:
        Two conversations with the same beginning, by the names in :data:`SIDES`; weights are 1 for
        turns that count, else 0. The chosen one has the margin as its target.
    """
    missing = [side for side in SIDES if side not in record]
    if missing:
        raise BadSample(f"a preference record needs chosen and rejected; {missing[0]} is missing.")
    if record.get("weight") is not None:
        raise BadSample("a preference record has no weight: every pair counts the same.")
    shared = record.get("messages") or []
    if not isinstance(shared, list):
        raise BadSample("messages must be a list of messages.")
    for side in SIDES:
        if not shared and not (isinstance(record[side], list) and record[side]):
            raise BadSample(f"{side} must be a list of messages.")
    sides = [[*shared, *_turns(record[side], side, "assistant")] for side in SIDES]
    rest = {k: v for k, v in record.items() if k not in (*SIDES, "messages", "margin")}
    if sides[0] == sides[1]:
        raise BadSample("chosen and rejected are the same.")
    pairs = zip(*sides, strict=False)
    unequal = (place for place, (a, b) in enumerate(pairs) if a != b)
    common = next(unequal, min(map(len, sides)))  # messages at the beginning that both share
    common += len(reading.instructed(sides[0])) - len(sides[0])
    pair = {
        side: _continued(rest, side, reading.instructed(messages), common, folder)
        for side, messages in zip(SIDES, sides, strict=True)
    }
    margin = 0.0 if record.get("margin") is None else number("margin", record["margin"])
    return {**pair, SIDES[0]: replace(pair[SIDES[0]], target=margin)}


def parse_labelled(
    record: Mapping[str, Any], folder: MediaFolder, reading: Reading = PLAIN
) -> Conversation:
    """Read a labelled record; the arguments and errors are those of :func:`parse_pair`."""
    if record.get("weight") is not None:
        raise BadSample("a labelled record has no weight: --desirable-weight weighs all alike.")
    prompt, answer = _parts(record)
    messages = reading.instructed([*prompt, *answer])
    rest = {k: v for k, v in record.items() if k not in (_LABEL, _PROMPT, _ANSWER, "messages")}
    before = len(messages) - len(answer)
    parsed = _continued(rest, _ANSWER, messages, before, folder)
    if any(map(_has_media, parsed.messages[before:])):
        raise BadSample("the answer has an image or a video; only the prompt may have them.")
    return replace(parsed, format="labelled", label=record[_LABEL])


def _parts(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages of a labelled record's prompt, and those of its answer."""
    if record.get(_PROMPT) is not None and record.get(_ANSWER) is not None:
        prompt = _turns(record[_PROMPT], _PROMPT, "user")
        return prompt, _turns(record[_ANSWER], _ANSWER, "assistant")
    messages = record.get("messages")
    if not isinstance(messages, list) or len(messages) < 2:
        raise BadSample(
            "a labelled record needs prompt and completion, or messages whose last one is the "
            "answer."
        )
    return messages[:-1], messages[-1:]


def _turns(value: Any, name: str, role: str) -> list[Any]:
    """Return the messages that the value of key `name` stands for; a text is one of `role`."""
    if isinstance(value, list) and value:
        return value
    if not isinstance(value, str | Mapping):
        raise BadSample(f"{name} must be text, a message or a list of messages.")
    return [{"role": role, "content": value} if isinstance(value, str) else value]


def _continued(
    rest: Mapping[str, Any], side: str, messages: list[Any], common: int, folder: MediaFolder
) -> Conversation:
    """Read a conversation of which only the messages after the first `common` count in the loss."""
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
    return replace(parsed, weights=[0.0] * common + own, format="preference")


def _has_media(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    return not isinstance(content, str) and any(part["type"] != "text" for part in content)
