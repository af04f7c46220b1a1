"""Parsing of records for other tasks than training on an answer or a document.

docs/preference.md shows the forms of records with compared answers, or with answers labelled as
wanted or not. Answers share the record's media, tools and first messages, and only assistant turns
after the shared messages count in the loss.

docs/embedding.md and docs/scores.md show those for ``--task embedding``, ``reranker`` and
``classify``. Compared texts are rendered as prompts; the embedding is taken at the last token of
the prompt. A reranker judges one document at a time; its prompt is that of Qwen3-VL-Reranker, and
the instruction is the query's system message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_qwen3vl.data.records.media import MediaFolder, options_of_all
from mcore_qwen3vl.data.records.messages import (
    MESSAGES,
    Conversation,
    place_of_message,
    read_messages,
)
from mcore_qwen3vl.data.records.nested import NestedForm, parse_nested, rows_of
from mcore_qwen3vl.data.records.parse import (
    FORMATS,
    PAIRED_ELSEWHERE,
    RETRIEVED,
    SIDES,
    is_preference,
    parse_record,
)
from mcore_qwen3vl.data.records.reading import (
    PLAIN,
    BadSample,
    Observed,
    Reading,
    read_observed,
    require_number,
    unused_keys,
)
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.unused.fields import Fields

_LABEL, _PROMPT, _ANSWER = "label", "prompt", "completion"
_ARGUMENTS = "chat_template_kwargs"


def require_preference(record: Mapping[str, Any], owner: str) -> None:
    """Raise BadSample unless it is a preference record; `owner` is who needs one, with the verb."""
    if is_preference(record):
        return
    needs = f"{owner} chosen and rejected"
    if other := next(filter(record.get, PAIRED_ELSEWHERE), None):
        raise BadSample(
            f"{other} is another program's key of preference records, and {needs}, which "
            "--preprocess MODULE:FUNCTION can write."
        )
    raise BadSample(f"it is not a preference record: {needs}.")


def is_labelled(record: Mapping[str, Any]) -> bool:
    """Return whether a JSON record is a labelled record."""
    return isinstance(record.get(_LABEL), bool)


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
    shared = _shared_messages(record)
    answers = {side: _rows_under(record[side], side) for side in SIDES}
    for side, answer in answers.items():
        if not shared and isinstance(answer, str | Mapping):
            raise BadSample(
                f"{side} is one answer, with neither messages nor a prompt before it: give them, "
                "or a list of messages."
            )
    sides = [[*shared, *_as_messages(answers[side], side, "assistant")] for side in SIDES]
    if not _is_missing(record.get(_PROMPT)):
        sides = [
            _with_prompt_once(messages, len(shared), side)
            for side, messages in zip(SIDES, sides, strict=True)
        ]
    rest = {k: v for k, v in record.items() if k not in (*SIDES, _PROMPT, "messages", "margin")}
    if sides[0] == sides[1]:
        raise BadSample("chosen and rejected are the same.")
    pairs = zip(*sides, strict=False)
    unequal = (place for place, (a, b) in enumerate(pairs) if a != b)
    common = next(unequal, min(map(len, sides)))  # messages at the beginning that both share
    # Both sides get the system prompt, or neither does.
    common += len(reading.add_system_prompt(sides[0])) - len(sides[0])
    pair = {
        side: _read_compared_answer(
            rest, side, reading.add_system_prompt(messages), common, folder
        )[0]
        for side, messages in zip(SIDES, sides, strict=True)
    }
    margin = 0.0 if record.get("margin") is None else require_number("margin", record["margin"])
    return {**pair, SIDES[0]: replace(pair[SIDES[0]], target=margin)}


def _shared_messages(record: Mapping[str, Any]) -> list[Any]:
    """Return the messages before both answers of a pair: ``messages``, or TRL's ``prompt``."""
    messages = rows_of(parse_nested(record.get("messages") or [], "messages"), "messages")
    if not isinstance(messages, list):
        raise BadSample("messages must be a list of messages.")
    if _is_missing(record.get(_PROMPT)):
        return messages
    if messages:
        raise BadSample("both messages and prompt are given; keep one of them.")
    return _messages_under(record[_PROMPT], _PROMPT, "user")


def _with_prompt_once(messages: list[Any], count: int, side: str) -> list[Any]:
    """Return a side of a pair without its first `count` messages, the prompt, if they come twice.

    Data sets with ``prompt`` often have whole conversations as answers.
    """

    def said(messages: list[Any]) -> list[Any]:
        return [
            (m.get("role"), m.get("content")) if isinstance(m, Mapping) else m for m in messages
        ]

    answer = messages[count:]
    if said(answer[:count]) == said(messages[:count]):
        return answer
    if isinstance(answer[0], Mapping) and answer[0].get("role") in ("system", "user"):
        raise BadSample(
            f"{side} begins with a message of the {answer[0]['role']}, and not with the prompt, "
            "which is also given: leave one of them out."
        )
    return messages


def _is_missing(value: Any) -> bool:
    return value is None or value in ("", [])


def parse_labelled(
    record: Mapping[str, Any], folder: MediaFolder, reading: Reading = PLAIN
) -> Conversation:
    """Read a labelled record; the arguments and errors are those of :func:`parse_pair`."""
    if record.get("weight") is not None:
        raise BadSample("a labelled record has no weight: --desirable-weight weighs all alike.")
    prompt, answer = _prompt_and_answer(record)
    messages = reading.add_system_prompt([*prompt, *answer])
    rest = {k: v for k, v in record.items() if k not in (_LABEL, _PROMPT, _ANSWER, "messages")}
    before = len(messages) - len(answer)
    parsed, own = _read_compared_answer(rest, _ANSWER, messages, before, folder)
    if any(map(_has_media, parsed.messages[own:])):
        raise BadSample("the answer has an image or a video; only the prompt may have them.")
    return replace(parsed, format="labelled", target=float(record[_LABEL]))


def _prompt_and_answer(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages of a labelled record's prompt, and those of its answer."""
    of_trl = [key for key in (_PROMPT, _ANSWER) if not _is_missing(record.get(key))]
    if of_trl and not _is_missing(record.get("messages")):
        raise BadSample(f"both messages and {of_trl[0]} are given; keep one of them.")
    if record.get(_PROMPT) is not None and record.get(_ANSWER) is not None:
        prompt = _messages_under(record[_PROMPT], _PROMPT, "user")
        return prompt, _messages_under(record[_ANSWER], _ANSWER, "assistant")
    messages = rows_of(parse_nested(record.get("messages"), "messages"), "messages")
    if not isinstance(messages, list) or len(messages) < 2:
        raise BadSample(
            "a labelled record needs prompt and completion, or messages whose last one is the "
            "answer."
        )
    return messages[:-1], messages[-1:]


def _messages_under(value: Any, name: str, role: str) -> list[Any]:
    """Return the messages that the value of key `name` stands for; a text is one of `role`."""
    return _as_messages(_rows_under(value, name), name, role)


def _rows_under(value: Any, name: str) -> Any:
    """Return the value of key `name`, as a list if it is JSON text of messages or a struct."""
    return rows_of(MESSAGES.parse(value, name), name)


def _as_messages(value: Any, name: str, role: str) -> list[Any]:
    if isinstance(value, list) and value:
        return value
    if not isinstance(value, str | Mapping):
        raise BadSample(f"{name} must be text, a message or a list of messages.")
    return [{"role": role, "content": value} if isinstance(value, str) else value]


def _read_compared_answer(
    rest: Mapping[str, Any], side: str, messages: list[Any], common: int, folder: MediaFolder
) -> tuple[Conversation, int]:
    """Read a conversation of which only the messages after the first `common` count in the loss.

    Returns:
        It, and the place in it from which its messages count.
    """
    whole = {**rest, "messages": messages}
    try:
        parsed = parse_record(whole, folder)
    except BadSample as error:
        raise BadSample(f"{side}: {error}") from error
    assert isinstance(parsed, Conversation)
    own = place_of_message(whole, common)
    weights = parsed.weights[own:]
    if set(weights) - {0.0, 1.0}:
        raise BadSample(f"{side}: here a message's weight is 0 or 1.")
    if not any(weights):
        raise BadSample(f"{side} has no assistant turn of its own, so nothing would be compared.")
    return replace(parsed, weights=[0.0] * own + weights, format="preference"), own


def _has_media(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    return not isinstance(content, str) and any(part["type"] != "text" for part in content)


QUERY, POSITIVE, NEGATIVE = "query", "positive", "negative"

_DOCUMENTS = {
    POSITIVE: RETRIEVED,
    NEGATIVE: ("negatives", NEGATIVE, "negative_messages"),
}
_MEDIA = ("images", "videos")
_SCORE = ("score", "label")
_INPUT = ("text", "image", "video")
_TEXT_FIELDS = Fields("a query or document", _INPUT)


def _is_of_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _is_input(value: Any) -> bool:
    """Return whether a value is an object with a text, image or video, or messages."""
    of_input = isinstance(value, Mapping) and bool(value) and value.keys() <= set(_INPUT)
    return of_input or MESSAGES.is_met_by(value)


_INPUTS = NestedForm("messages", _is_input, MESSAGES.begins, 'an object, {"text": …}')
"""What a query or a document may be beside text."""
_TEXTS = NestedForm("texts", _is_of_texts, MESSAGES.begins, _INPUTS.literally)
_LABELS = NestedForm(
    "labels",
    lambda value: isinstance(value, list) and all(isinstance(each, int | str) for each in value),
    None,
    "a list of it",
)

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
    seen, prompts = Observed(record), {}
    options = options_of_all(seen)
    for name, text, media in _texts_with_media(seen):
        if isinstance(text, str) and not text.strip() and not any(media.values()):
            raise BadSample(f"{name} is empty.")
        try:
            text = _INPUTS.parse(text, "it")
            messages = reading.add_system_prompt(messages_of(text))
            conversation = {**options, **media, "messages": messages}
            conversation[_ARGUMENTS] = seen.get(_ARGUMENTS)
            read = read_messages(conversation, folder, prompt=True)
            plain = isinstance(text, Mapping) and "role" not in text
            prompts[name] = replace(
                read, unused=(*read.unused, *(unused_keys(_TEXT_FIELDS, text) if plain else ()))
            )
        except BadSample as error:
            raise BadSample(f"{name}: {error}") from error
    if not prompts:
        raise BadSample("a retrieval record has query, or messages, and positive.")
    if QUERY in prompts:
        key = next((key for key in _SCORE if seen.get(key) is not None), None)
        score = None if key is None else require_number(key, record[key])
        prompts[QUERY] = replace(prompts[QUERY], target=score)
    of_record = seen.unused
    return {
        name: replace(prompt, format="retrieval", unused=(*of_record, *prompt.unused))
        for name, prompt in prompts.items()
    }


def _texts_with_media(record: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the name, the text and the media of the query and of each document."""
    query = next((record[key] for key in (QUERY, "messages") if record.get(key) is not None), None)
    if query is not None:
        keys_of_media = ("image", "video", *_MEDIA)
        yield QUERY, query, {kind: record[kind] for kind in keys_of_media if kind in record}
    for kind, keys in _DOCUMENTS.items():
        present = [key for key in keys if record.get(key) is not None]
        if len(present) > 1:
            raise BadSample(f"both {present[0]} and {present[1]} are given; keep one of them.")
        documents = _documents_under(present[0], record[present[0]]) if present else []
        if kind == POSITIVE and len(documents) > 1:
            raise BadSample(f"{present[0]} holds {len(documents)} documents; one is needed.")
        lists = {name: _nested_list(record, f"{kind}_{name}") for name in _MEDIA}
        for name, entries in lists.items():
            if entries and len(entries) != len(documents):
                raise BadSample(
                    f"{kind}_{name} needs one list for each of {len(documents)} documents, and "
                    f"has {len(entries)}."
                )
        for place, document in enumerate(documents):
            name = kind if kind == POSITIVE else f"{NEGATIVE} {place}"
            yield name, document, {key: entries[place] for key, entries in lists.items() if entries}


def _nested_list(record: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list under `key`, which is empty if there is none."""
    value = parse_nested(record.get(key) or [], key)
    if not isinstance(value, list):
        raise BadSample(f"{key} is {type(value).__name__}; a list is needed.")
    return value


def _documents_under(key: str, value: Any) -> list[Any]:
    """Return the documents under `key`; a key in the plural, or ms-swift's, holds a list.

    A list of texts is one of documents under the other keys too, where a list of messages is not.
    """
    if key in (POSITIVE, NEGATIVE):
        value = _TEXTS.parse(value, key)
        return value if _is_of_texts(value) else [value]
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_nested(value, key)
    if not isinstance(value, list):
        raise BadSample(f"{key} is {type(value).__name__}; a list of documents is needed.")
    return value


def messages_of(text: Any) -> list[Any]:
    """Return the messages that a text of any kind stands for."""
    text = rows_of(text, "it")
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
        content = text.get(kind)
        many = content if isinstance(content, list) else [content]
        parts += [{"type": kind, kind: part} for part in many if part is not None]
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
    return {name: _make_judgement(query, document, name) for name, document in texts.items()}


def _make_judgement(query: Conversation, document: Conversation, name: str) -> Conversation:
    """Make the prompt by which a reranker judges one document."""
    instruction, asked = _split_system(query, QUERY)
    system, offered = _split_system(document, name)
    if system not in (None, instruction):
        raise BadSample(f"{name} has a system message; the instruction belongs to the query.")
    content = [
        _text_part(f"<Instruct>: {_INSTRUCTION if instruction is None else instruction}"),
        *(_text_part("<Query>:"), *asked),
        *(_text_part("\n<Document>:"), *offered),
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
        chat_template_kwargs=query.chat_template_kwargs,
        format=query.format,
        unused=(*query.unused, *document.unused),
    )


def _split_system(text: Conversation, name: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text of the system message, if there is one, and the other message's parts."""
    system, rest = None, text.messages
    if rest[0]["role"] == "system":
        system, rest = "".join(part["text"] for part in _parts_of(rest[0])), rest[1:]
    if len(rest) != 1:
        raise BadSample(f"{name} has {len(rest)} messages; a reranker takes one.")
    return system, _parts_of(rest[0])


def _parts_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return [_text_part(content)] if isinstance(content, str) else content


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def is_classification(record: Mapping[str, Any]) -> bool:
    """Return whether a record can only be a classifier's: it has a label, and no answer."""
    if isinstance(record.get(_LABEL, True), bool):
        return False
    if record.get("messages") is not None:
        messages = _rows_under(record["messages"], "messages")
        return isinstance(messages, list) and not _is_answered(messages)
    of_another = any(record.get(key) is not None for form in FORMATS for key in form.keys)
    return not of_another and any(record.get(key) is not None for key in _INPUT)


def parse_classification(
    record: Mapping[str, Any], folder: MediaFolder, reading: Reading, labels: Labels | None
) -> Conversation:
    """Read a classifier's record, whose target is 1 for each right one of `labels` and else 0.

    Without `labels` the record needs none. Of `reading` only the system prompt counts.
    """
    rest = {key: value for key, value in record.items() if key != _LABEL}
    messages = record.get("messages")
    if messages is None:
        messages = messages_of({key: rest.pop(key) for key in _INPUT if key in rest})
    messages = rows_of(parse_nested(messages, "messages"), "messages")
    if not isinstance(messages, list):
        raise BadSample("messages must be a list of messages.")
    rest |= {"messages": reading.add_system_prompt(messages)}
    prompt = not _is_answered(messages)
    read = partial(read_messages, folder=folder, prompt=prompt)
    named = labels_in(record)
    target = None if labels is None else _target_of_labels(named, labels)
    return replace(read_observed(rest, "classification", read), target=target)


def labels_in(record: Mapping[str, Any]) -> list[int | str]:
    """Return the numbers and names in a record's ``label``; none if it has no label.

    A table that lacks some labels has the others as floats, such as 1.0.
    """
    label = _LABELS.parse(record.get(_LABEL), _LABEL)
    given = label if isinstance(label, list) else [] if label is None else [label]
    labels = [
        int(each) if isinstance(each, float) and each.is_integer() else each for each in given
    ]
    for each in labels:
        if not isinstance(each, int | str) or (isinstance(each, int) and each < 0):
            raise BadSample(f"label is {label!r:.60}; a number from 0 or a name is needed.")
    return labels


def _target_of_labels(named: list[int | str], labels: Labels) -> tuple[float, ...]:
    """Return 1 for each of `labels` that a record names, by name or number, and 0 for others."""
    numbers = {name: number for number, name in enumerate(labels.names)}
    right = {numbers.get(label) if isinstance(label, str) else int(label) for label in named}
    if any(label is None or label >= len(labels) for label in right):
        raise BadSample(
            f"label is {named!r:.60}; the {len(labels)} labels are {', '.join(labels.names)[:200]}."
        )
    if labels.are_exclusive and len(right) != 1:
        raise BadSample(
            f"it has {len(right)} labels, and --task classify trains on one. For several, pass "
            "--problem-type multi_label_classification."
        )
    return tuple(float(number in right) for number in range(len(labels)))


def _is_answered(messages: list[Any]) -> bool:
    last = messages[-1] if messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"
