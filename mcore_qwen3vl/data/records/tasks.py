"""Records for ``--task embedding``, ``reranker`` and ``classify``.

docs/embedding.md and docs/scores.md show their forms. Texts that are compared are rendered as
prompts, at whose last token the embedding is taken. A reranker judges one document at a time; its
prompt is that of Qwen3-VL-Reranker, and the instruction is the query's system message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation, read_messages, unpacked
from mcore_qwen3vl.data.records.parse import FORMATS, RETRIEVED
from mcore_qwen3vl.data.records.reading import (
    PLAIN,
    Observed,
    Reading,
    checked,
    number,
    observed,
)
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.unused import Fields

QUERY, POSITIVE, NEGATIVE = "query", "positive", "negative"

_DOCUMENTS = {
    POSITIVE: RETRIEVED,
    NEGATIVE: ("negatives", NEGATIVE, "negative_messages"),
}
_MEDIA = ("images", "videos")
_SCORE = ("score", "label")
_LABEL = "label"
_INPUT = ("text", "image", "video")
_TEXT = Fields("a query or document", _INPUT)

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."


def parse_retrieval(
    record: Mapping[str, Any], folder: MediaFolder, reading: Reading = PLAIN
) -> dict[str, Conversation]:
    """Read a record's texts as prompts; some of them may be missing.

    The data set's hook has been applied. Only the system prompt of `reading` is used.

    Returns:
        The texts by name, in this order: ``query``, ``positive``, ``negative 0`` and so on. The
        query has the score as its target.
    """
    seen, found = Observed(record), {}
    for name, text, media in _texts(seen):
        if isinstance(text, str) and not text.strip() and not any(media.values()):
            raise BadSample(f"{name} is empty.")
        try:
            messages = reading.instructed(messages_of(text))
            read = read_messages({**media, "messages": messages}, folder, prompt=True)
            plain = isinstance(text, Mapping) and "role" not in text
            found[name] = replace(
                read, unused=(*read.unused, *(checked(_TEXT, text) if plain else ()))
            )
        except BadSample as error:
            raise BadSample(f"{name}: {error}") from error
    if not found:
        raise BadSample("a retrieval record has query, or messages, and positive.")
    if QUERY in found:
        key = next((key for key in _SCORE if seen.get(key) is not None), None)
        score = None if key is None else number(key, record[key])
        found[QUERY] = replace(found[QUERY], target=score)
    of_record = seen.unused
    return {
        name: replace(one, format="retrieval", unused=(*of_record, *one.unused))
        for name, one in found.items()
    }


def _texts(record: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the name, the text and the media of the query and of each document."""
    query = next((record[key] for key in (QUERY, "messages") if record.get(key) is not None), None)
    if query is not None:
        own = ("image", "video", *_MEDIA)
        yield QUERY, query, {kind: record[kind] for kind in own if kind in record}
    for kind, keys in _DOCUMENTS.items():
        given = [key for key in keys if record.get(key) is not None]
        if len(given) > 1:
            raise BadSample(f"both {given[0]} and {given[1]} are given; keep one of them.")
        documents = _documents(given[0], record[given[0]]) if given else []
        if kind == POSITIVE and len(documents) > 1:
            raise BadSample(f"{given[0]} holds {len(documents)} documents; one is needed.")
        lists = {name: record.get(f"{kind}_{name}") or [] for name in _MEDIA}
        for name, held in lists.items():
            if held and len(held) != len(documents):
                raise BadSample(
                    f"{kind}_{name} needs one list for each of {len(documents)} documents, and "
                    f"has {len(held)}."
                )
        for place, document in enumerate(documents):
            name = kind if kind == POSITIVE else f"{NEGATIVE} {place}"
            yield name, document, {key: held[place] for key, held in lists.items() if held}


def _documents(key: str, value: Any) -> list[Any]:
    """Return the documents under `key`; a key in the plural, or ms-swift's, holds a list.

    A list of texts is one of documents under the other keys too, where a list of messages is not.
    """
    if key in (POSITIVE, NEGATIVE):
        texts = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
        return value if texts else [value]
    if not isinstance(value, list):
        raise BadSample(f"{key} is {type(value).__name__}; a list of documents is needed.")
    return value


def messages_of(text: Any) -> list[Any]:
    """Return the messages that a text of any kind stands for."""
    if isinstance(text, str):
        return [{"role": "user", "content": text}]
    if isinstance(text, list) and text:
        return text
    if not isinstance(text, Mapping):
        raise BadSample("it must be a text, an object with text, image or video, or messages.")
    if "role" in text:
        return [text]
    parts: list[dict[str, Any]] = []
    for kind in ("video", "image", "text"):  # the order of Qwen3-VL-Embedding's own program
        given = text.get(kind)
        many = given if isinstance(given, list) else [given]
        parts += [{"type": kind, kind: one} for one in many if one is not None]
    if not parts:
        raise BadSample("it has none of text, image and video.")
    return [{"role": "user", "content": parts}]


def parse_judgements(
    record: Mapping[str, Any], folder: MediaFolder, reading: Reading = PLAIN
) -> dict[str, Conversation]:
    """Read a retrieval record as one prompt for each document, by the document's name."""
    texts = parse_retrieval(record, folder, reading)
    query = texts.pop(QUERY, None)
    if query is None or not texts:
        raise BadSample(
            f"a reranker judges a document by a query; it has no {'document' if query else QUERY}."
        )
    return {name: _judgement(query, document, name) for name, document in texts.items()}


def _judgement(query: Conversation, document: Conversation, name: str) -> Conversation:
    instruction, asked = _split(query, QUERY)
    own, offered = _split(document, name)
    if own not in (None, instruction):
        raise BadSample(f"{name} has a system message; the instruction belongs to the query.")
    content = [
        _text(f"<Instruct>: {_INSTRUCTION if instruction is None else instruction}"),
        *(_text("<Query>:"), *asked),
        *(_text("\n<Document>:"), *offered),
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": content},
    ]
    return Conversation(
        messages,
        [*query.media, *document.media],
        [0.0, 0.0],
        prompt=True,
        format=query.format,
        unused=(*query.unused, *document.unused),
    )


def _split(text: Conversation, name: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text of the system message, if there is one, and the other message's parts."""
    system, rest = None, text.messages
    if rest[0]["role"] == "system":
        system, rest = "".join(part["text"] for part in _parts(rest[0])), rest[1:]
    if len(rest) != 1:
        raise BadSample(f"{name} has {len(rest)} messages; a reranker takes one.")
    return system, _parts(rest[0])


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [_text(content)] if isinstance(content, str) else content


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


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
    """Read a classifier's record, whose target is 1 for each of `labels` that is right and else 0.

    Without `labels` the record needs none. Of `reading` only the system prompt counts.
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
