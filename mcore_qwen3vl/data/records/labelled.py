"""Labelled records: a prompt, an answer, and whether the answer is wanted, for KTO.

A record has ``label``, which is true or false, and one of these forms:

- ``prompt`` and ``completion``, as in TRL: each is a text, a message or a list of messages;
- ``messages``, as in ms-swift: the last of them is the answer.

The record's images, videos and tools belong to the prompt. Only the answer's assistant turns count
in the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parsed import Conversation
from mcore_qwen3vl.data.records.preference import continued, turns_of
from mcore_qwen3vl.data.records.reading import Reading

LABELLED = "labelled"
"""The name of the format."""

_LABEL, _PROMPT, _ANSWER = "label", "prompt", "completion"


def is_labelled(record: Any) -> bool:
    """Return whether a JSON record is a labelled record."""
    return isinstance(record, Mapping) and isinstance(record.get(_LABEL), bool)


def parse_labelled(
    record: Mapping[str, Any], folder: MediaFolder, reading: Reading
) -> Conversation:
    """Read a labelled record.

    Args:
        record: a record in a form that the module describes, after the data set's hook.
        folder: folder of the media.
        reading: how the data set's records are read; only its system prompt counts.

    Returns:
        The conversation with its label. A message's weight is 1 if it counts, else 0.

    Raises:
        BadSample: the record is malformed, and the message says how.
    """
    if record.get("weight") is not None:
        raise BadSample("a labelled record has no weight: --desirable-weight weighs all alike.")
    prompt, answer = _parts(record)
    messages = reading.instructed([*prompt, *answer])
    rest = {k: v for k, v in record.items() if k not in (_LABEL, _PROMPT, _ANSWER, "messages")}
    before = len(messages) - len(answer)
    parsed = continued(rest, _ANSWER, messages, before, folder)
    if any(map(_has_media, parsed.messages[before:])):
        raise BadSample("the answer has an image or a video; only the prompt may have them.")
    return replace(parsed, format=LABELLED, label=record[_LABEL])


def _parts(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages of the prompt and those of the answer."""
    if record.get(_PROMPT) is not None and record.get(_ANSWER) is not None:
        prompt = turns_of(record[_PROMPT], _PROMPT, "user")
        return prompt, turns_of(record[_ANSWER], _ANSWER, "assistant")
    messages = record.get("messages")
    if not isinstance(messages, list) or len(messages) < 2:
        raise BadSample(
            "a labelled record needs prompt and completion, or messages whose last one is the "
            "answer."
        )
    return messages[:-1], messages[-1:]


def _has_media(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    return not isinstance(content, str) and any(part["type"] != "text" for part in content)
