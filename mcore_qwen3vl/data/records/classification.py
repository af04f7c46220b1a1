"""Records of a classifier: messages, or a text with media, and a label.

A record has ``label``: a number from 0, a name, or, if several labels may be right, a list of
either. ms-swift's records for ``seq_cls`` are of this form. The input is one of these:

- ``messages``; if the last one is not an answer, the generation prompt follows it;
- ``text``, ``image`` and ``video``, of which one is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import read_messages, unpacked
from mcore_qwen3vl.data.records.parse import FORMATS
from mcore_qwen3vl.data.records.parsed import Conversation, observed
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.data.records.retrieval import messages_of
from mcore_qwen3vl.labels import Labels

_LABEL = "label"
_INPUT = ("text", "image", "video")


def is_classification(record: Any) -> bool:
    """Return whether a record can only be a classifier's: it has a label, and no answer."""
    if not isinstance(record, Mapping) or isinstance(record.get(_LABEL, True), bool):
        return False
    messages = record.get("messages")
    if isinstance(messages, list):
        return not _is_answered(messages)
    of_another = any(record.get(key) is not None for form in FORMATS for key in form.keys)
    return not of_another and any(record.get(key) is not None for key in _INPUT)


def parse_classification(
    record: Mapping[str, Any], folder: MediaFolder, reading: Reading, labels: Labels | None
) -> Conversation:
    """Read a classifier's record.

    Args:
        reading: how the data set's records are read; only its system prompt counts.
        labels: the labels that there are; None: the record needs none.

    Returns:
        The conversation, with 1 for each of `labels` that is right and 0 for others.
    """
    rest = {key: value for key, value in record.items() if key not in (_LABEL, *_INPUT)}
    messages = record.get("messages")
    if messages is None:
        messages = messages_of({key: record[key] for key in _INPUT if key in record})
    messages = unpacked(messages, "messages")
    if not isinstance(messages, list):
        raise BadSample("messages must be a list of messages.")
    rest |= {"messages": reading.instructed(messages)}
    prompt = not _is_answered(messages)
    read = partial(read_messages, folder=folder, prompt=prompt)
    given = labels_in(record)
    target = None if labels is None else _target(given, labels)
    return replace(observed(rest, "classification", read), target=target)


def labels_in(record: Mapping[str, Any]) -> list[int | str]:
    """Return the numbers and names in a record's ``label``; none if it has no label."""
    label = record.get(_LABEL)
    given = label if isinstance(label, list) else [] if label is None else [label]
    for one in given:
        if not isinstance(one, int | str) or (isinstance(one, int) and one < 0):
            raise BadSample(f"label is {label!r:.60}; a number from 0 or a name is needed.")
    return given


def _target(given: list[int | str], labels: Labels) -> tuple[float, ...]:
    numbers = {name: number for number, name in enumerate(labels.names)}
    right = {numbers.get(one) if isinstance(one, str) else int(one) for one in given}
    if any(one is None or one >= len(labels) for one in right):
        raise BadSample(
            f"label is {given!r:.60}; the {len(labels)} labels are {', '.join(labels.names)[:200]}."
        )
    if labels.is_single and len(right) != 1:
        raise BadSample(
            f"it has {len(right)} labels, and --task classify trains on one. For several, pass "
            "--problem-type multi_label_classification."
        )
    return tuple(float(number in right) for number in range(len(labels)))


def _is_answered(messages: list[Any]) -> bool:
    last = messages[-1] if messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"
