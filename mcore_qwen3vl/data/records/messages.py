"""Conversations: ``messages`` of OpenAI and ms-swift, ``conversations`` of LLaVA and ShareGPT.

Each message becomes one that chat templates read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_qwen3vl.data.records.boxes import OBJECT_TAG, place_objects
from mcore_qwen3vl.data.records.media import (
    KINDS,
    OPTION_NAMES,
    TAG,
    Kind,
    Media,
    MediaFolder,
    RecordMedia,
    media_list,
    unused_of_lists,
    unused_of_reference,
)
from mcore_qwen3vl.data.records.nested import NestedForm, parse_nested, rows_of
from mcore_qwen3vl.data.records.reading import (
    BadSample,
    parse_template_kwargs,
    unused_keys,
    weight_of,
)
from mcore_qwen3vl.data.records.tool_calls import (
    parse_calls_in_text,
    parse_tool_calls,
    parse_tools,
    with_tool_calls,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.unused.fields import Fields, Unused


@dataclass(frozen=True)
class Conversation:
    """Chat messages in the form that HF chat templates read, with their media in order."""

    messages: list[dict[str, Any]]
    media: list[Media]
    weights: list[float]  # one a message; 0 for all but assistant turns
    tools: list[Any] | None = None
    prompt: bool = False  # rendered with the generation prompt, and not trained on
    target: float | tuple[float, ...] | None = None
    """A pair's margin, on the chosen side; the score of two texts, on the query; 1 for an answer
    labelled as wanted, else 0; or 1 for each right label of a classifier, else 0.
    """
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, over those of the data set."""
    format: str = field(default="", compare=False)  # format of the record
    unused: tuple[Unused, ...] = field(default=(), compare=False)


_CALL = "a call of a tool"  # internal: an assistant turn whose text is the call as JSON
_ROLES = {
    "messages": {
        "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
        "tool": "tool", "function": "tool",
        # names of ms-swift
        "tool_call": _CALL, "tool_response": "tool",
    },
    "conversations": {
        "system": "system", "human": "user", "user": "user", "gpt": "assistant",
        "assistant": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
        "function_call": _CALL, "observation": "tool", "tool": "tool", "function_response": "tool",
    },
}  # fmt: skip
_SPEAKER_AND_TEXT = {"messages": ("role", "content"), "conversations": ("from", "value")}
_OWN = ("content", "weight", "loss")  # keys of a message that the template does not get
MESSAGE = Fields(
    "a message",
    (*_OWN, "role", "name", "tool_calls", "tool_call_id", "reasoning_content"),
    inert=("id",),
)
"""Keys of a message that we or chat templates read; all but our own get to the templates."""
_PROMPT_TURN = Fields(
    "a message that is not the assistant's",
    (),
    without_effect={"weight": (0, 0.0), "loss": (False, 0, 0.0)},
    reasons=dict.fromkeys(("weight", "loss"), "only turns of the assistant are trained"),
)
_AS_TEXT = "text there"  # what becomes of a tag where it is not the place of any media
_KEYS_OF_OTHER_TASKS = {"chosen", "rejected", "label", "query", "positive", "positive_messages"}


def read_messages(
    record: Mapping[str, Any], folder: MediaFolder, *, prompt: bool = False
) -> Conversation:
    """Read ``messages`` with ``role`` and ``content``: text with or without tags, or parts."""
    turns = []
    for index, message in enumerate(_require_turns(record, "messages"), 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadSample(f"message {index} must be an object with a role and content.")
        turns.append(with_tool_calls(message))
    return _make_conversation(record, "messages", turns, folder, prompt=prompt)


def read_conversations(record: Mapping[str, Any], folder: MediaFolder) -> Conversation:
    """Read ``conversations`` with ``from`` and ``value``, and optionally a ``system`` text."""
    turns = []
    for index, turn in enumerate(_require_turns(record, "conversations"), 1):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str):
            raise BadSample(f"turn {index} must be an object with from and value.")
        if not isinstance(turn.get("value"), str):
            raise BadSample(
                f"turn {index}: value is {type(turn.get('value')).__name__}; text is needed."
            )
        kept = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turns.append({**kept, "role": turn["from"], "content": turn["value"]})
    return _make_conversation(record, "conversations", turns, folder)


def records_of_turns(record: Any) -> list[Any]:
    """Return one record for each trained turn of a conversation, which ends with that turn.

    Earlier turns have the weight 0, so that a template may leave their reasoning out, as it does
    when it generates. Records of other kinds stay as they are; a malformed message is a BadSample.
    """
    key = next((key for key in _ROLES if isinstance(record, Mapping) and record.get(key)), None)
    if key is None or _KEYS_OF_OTHER_TASKS & record.keys():
        return [record]
    speaker, text = _SPEAKER_AND_TEXT[key]
    turns = _require_turns(record, key)
    for index, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping):
            raise BadSample(f"message {index} must be an object with {speaker} and {text}.")
    roles = [_ROLES[key].get(turn.get(speaker)) for turn in turns]
    prompt: list[Mapping[str, Any]] = []
    records = []
    for turn, role, following in zip(turns, roles, [*roles[1:], None], strict=True):
        answers = role in ("assistant", _CALL)
        goes_on = _is_same_turn(role, following)
        if answers and not goes_on and weight_of(turn) * weight_of(turn, "loss") > 0:
            start = len(prompt)
            # The messages before that are of the same turn keep their weights.
            while start and _is_same_turn(roles[start - 1], roles[start]):
                start -= 1
            messages = [*prompt[:start], *turns[start : len(prompt) + 1]]
            records.append({**_with_used_media_only(record, key, messages), key: messages})
        prompt.append({**turn, "weight": 0} if answers else turn)
    return records or [record]


def _with_used_media_only(
    record: Mapping[str, Any], key: str, messages: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the record with only the images, videos and objects that the messages use."""
    speaker, text = _SPEAKER_AND_TEXT[key]
    # The text of a call is JSON, in which a tag is no place.
    contents = [
        one.get(text) for one in messages if _ROLES[key].get(str(one.get(speaker))) != _CALL
    ]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    reasoning = (message.get("reasoning_content") for message in messages)
    texts = [
        *(
            held
            for held in (record.get("system"), *contents, *reasoning, *parts)
            if isinstance(held, str)
        ),
        *(part["text"] for part in parts if isinstance(part, Mapping) and "text" in part),
    ]
    cut = dict(record)
    for kind in KINDS:
        used = sum(content.count(f"<{kind}>") for content in contents if isinstance(content, str))
        used += sum(
            _media_kind_of(part) == kind and not _reference_key(kind, part) for part in parts
        )
        left = media_list(record, kind)[:used]
        cut |= {name: left for name in (kind, f"{kind}s") if record.get(name)}
    if isinstance(objects := parse_nested(record.get("objects"), "objects"), Mapping):
        kinds = [kind for text in texts for kind in OBJECT_TAG.findall(text)]
        counts = {"ref": kinds.count("ref-object"), "bbox": kinds.count("bbox")}
        counts["image_id"] = counts["bbox"]
        trimmed = {
            name: objects[name][:count]
            for name, count in counts.items()
            if isinstance(objects.get(name), list)
        }
        cut["objects"] = {**objects, **trimmed}
    return cut


def _require_turns(record: Mapping[str, Any], key: str) -> list[Any]:
    turns = rows_of(parse_nested(record[key], key), key)
    if not isinstance(turns, list) or not turns:
        raise BadSample(f"{key} must be a list of at least one message.")
    return [_with_parts(turn) for turn in turns] if key == "messages" else turns


def _with_parts(message: Any) -> Any:
    """Return `message` with its content as a list, if that is a list of parts as JSON text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    # The text of a call is JSON of its own.
    if not isinstance(content, str) or _ROLES["messages"].get(str(message.get("role"))) == _CALL:
        return message
    parts = PARTS.parse(content, "content")
    return message if parts is content else {**message, "content": parts}


def _is_of_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, one message, or a struct of lists of them."""
    if not isinstance(value, Mapping):
        return isinstance(value, list) and bool(value) and all(map(_is_message, value))
    roles = value.get("role")
    if isinstance(roles, list) and isinstance(value.get("content"), list):
        return all(_is_message({**value, "role": role}) for role in roles)
    return _is_message(value)


def _is_message(value: Any) -> bool:
    said = {"role": ("content", "tool_calls", "function_call"), "from": ("value",)}
    return isinstance(value, Mapping) and any(
        isinstance(role := value.get(speaker), str)
        and role in _ROLES[key]
        and any(name in value for name in said[speaker])
        for key, speaker in (("messages", "role"), ("conversations", "from"))
    )


def _is_of_parts(value: Any) -> bool:
    """Return whether a value is a list of parts of a content, with no other keys than theirs.

    An answer may list the blocks of a page, which have the same types and other keys.
    """
    return isinstance(value, list) and bool(value) and all(map(_is_part, value))


def _is_part(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    if value.get("type") == "text":
        return value.keys() == {"type", "text"} and isinstance(value["text"], str)
    kind = _media_kind_of(value)
    if kind is None:
        return False
    return value.keys() <= {"type", _reference_key(kind, value), *OPTION_NAMES[kind]}


MESSAGES = NestedForm(
    "messages",
    _is_of_messages,
    re.compile(r"""\s*\[\s*\{\s*(['"])(role|from)\1\s*:\s*(['"])\w+\3\s*,"""),
    "the content of a message",
)
PARTS = NestedForm(
    "parts",
    _is_of_parts,
    # As Python writes it. Broken JSON with these keys may be an answer that lists blocks.
    re.compile(r"\s*\[\s*\{\s*'type'\s*:\s*'(text|image|video)'\s*,\s*'(text|image|video)"),
    'a part, {"type": "text", "text": …}',
)


def _make_conversation(
    record: Mapping[str, Any],
    key: str,
    turns: Sequence[Mapping[str, Any]],
    folder: MediaFolder,
    *,
    prompt: bool = False,
) -> Conversation:
    """Make a conversation of a record, whose turns have a role and content each."""
    media = RecordMedia(record, folder)
    sample_weight = weight_of(record)
    rendered: list[dict[str, Any]] = []
    weights: list[float] = []
    unused = unused_of_lists(record)
    system = record.get("system")
    if system is not None and system != "":
        if not isinstance(system, str):
            raise BadSample(f"system is {type(system).__name__}; text is needed.")
        if turns[0]["role"] == "system":
            raise BadSample(
                "the record has both a system text and a system turn; keep one of them."
            )
        rendered.append({"role": "system", "content": system})
        weights.append(0.0)
        unused += _unused_tags(system, "the system text")
    previous = None
    for index, turn in enumerate(turns, 1):
        role = _ROLES[key].get(turn["role"])
        if role is None:
            raise BadSample(
                f"message {index}: the role {turn['role']!r:.40} is not known; use one "
                f"of {', '.join(_ROLES[key])}."
            )
        message, left = _template_message(turn, role, index, media)
        unused += left
        # A zero in either of them masks a turn.
        weight = weight_of(turn) * weight_of(turn, "loss") * sample_weight
        if _is_same_turn(previous, role):
            if weight != weights[-1]:
                raise BadSample(
                    f"message {index}: a tool call must have the weight of what the assistant "
                    "says before it: they are one turn."
                )
            _add_call(rendered[-1], message, index)
        else:
            rendered.append(message)
            weights.append(weight if message["role"] == "assistant" else 0.0)
        previous = role
    media.check_all_used({item.name: item.where for item in unused if item.why == _AS_TEXT})
    unused += _place_objects_in_messages(record, rendered, media.media)
    if not (prompt or any(weights)):
        raise BadSample("no assistant turn has a weight above 0, so nothing would be trained.")
    return Conversation(
        rendered,
        media.media,
        weights,
        parse_tools(record),
        prompt,
        chat_template_kwargs=_template_kwargs(record),
        unused=tuple(dict.fromkeys(unused)),
    )


def place_of_message(record: Mapping[str, Any], number: int) -> int:
    """Return the place, in the parsed conversation, of a record's message; all count from 0.

    A ``system`` text of the record stands first. Calls of tools go on with the turn before them.
    The number may be that of the messages: then it is the number of the conversation's.
    """
    roles = [_ROLES["messages"].get(turn["role"]) for turn in _require_turns(record, "messages")]
    begins = [
        not _is_same_turn(before, role) for before, role in zip([None, *roles], roles, strict=False)
    ]
    inside = number < len(roles)
    return bool(record.get("system")) + sum(begins[: number + inside]) - inside


def _is_same_turn(role: str | None, following: str | None) -> bool:
    """Return whether a message goes on with the turn of the one before, given their roles.

    The calls of tools do, as in ms-swift: the assistant thinks or speaks, and then calls.
    """
    return following == _CALL and role in ("assistant", _CALL)


def _add_call(turn: dict[str, Any], message: Mapping[str, Any], index: int) -> None:
    """Add a message that calls tools to the turn of the assistant before it.

    A null, as a table has it, is no reasoning. Of other keys, such as a number of each message, the
    turn keeps what it has.
    """
    turn["tool_calls"] = [*(turn.get("tool_calls") or []), *message["tool_calls"]]
    key = "reasoning_content"
    before = turn.get(key)
    if before is None:
        turn.pop(key, None)
    elif message.get(key) not in (None, before):
        raise BadSample(
            f"message {index}: {key} is also given in the message before it, and both are one turn "
            "of the assistant: keep one of them."
        )
    for name, value in message.items():
        turn.setdefault(name, value)


def _place_objects_in_messages(
    record: Mapping[str, Any], messages: list[dict[str, Any]], media: Sequence[Media]
) -> list[Unused]:
    """Put the record's objects in place of their tags; return what is not used of them."""
    texts = [
        (index, holder, key)
        for index, message in enumerate(messages, 1)
        for holder, key in (
            (message, "reasoning_content"),
            (message, "content"),
            *((part, "text") for part in message["content"] if isinstance(part, dict)),
        )
        if isinstance(holder.get(key), str) and OBJECT_TAG.search(holder[key])
    ]
    if not texts:
        return []
    images = [medium for medium in media if medium.kind == "image"]
    objects = parse_nested(record.get("objects"), "objects")
    try:
        placed, unused = place_objects([holder[key] for _, holder, key in texts], objects, images)
    except BadSample as error:
        place = "" if isinstance(objects, Mapping) else f"message {texts[0][0]}: "
        raise BadSample(f"{place}{error}") from error
    for (_, holder, key), text in zip(texts, placed, strict=True):
        holder[key] = text
    return unused


def _template_message(
    turn: Mapping[str, Any], role: str, index: int, media: RecordMedia
) -> tuple[dict[str, Any], list[Unused]]:
    """Return a turn in the form that templates read, and what is not used of it."""
    kept = {name: value for name, value in turn.items() if name not in _OWN}
    if kept.get("tool_calls"):
        kept["tool_calls"] = parse_tool_calls(kept["tool_calls"], index)
    unused = unused_keys(MESSAGE, turn)
    unused += _unused_tags(turn.get("reasoning_content"), "reasoning_content")
    if role == _CALL:
        calls = parse_calls_in_text(turn, index, unused)
        return {**kept, "role": "assistant", "content": "", "tool_calls": calls}, unused
    if role != "assistant":
        weights = {name: turn[name] for name in ("weight", "loss") if name in turn}
        unused += _PROMPT_TURN.unused(weights)
    if turn.get("content") is None and role != "assistant":
        raise BadSample(
            f"message {index} has no content; its keys are {', '.join(map(str, turn))}."
        )
    try:
        content = _template_content(turn.get("content"), media, unused)
    except BadSample as error:
        said = f"message {index}: {error}"
        if isinstance(turn.get("content"), str) and TAG.search(turn["content"]):
            said += (
                ' Text that itself has such a tag is given as a part: {"type": "text", "text": …}.'
            )
        raise BadSample(said) from error
    if role == "assistant" and _is_empty(content) and not kept.get("tool_calls"):
        raise BadSample(f"message {index}, an assistant turn, is empty.")
    return {**kept, "role": role, "content": content}, unused


def _template_kwargs(record: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return parse_template_kwargs(record.get("chat_template_kwargs"))
    except BadInput as error:
        raise BadSample(str(error)) from error


def _template_content(
    content: Any, media: RecordMedia, unused: list[Unused]
) -> str | list[dict[str, Any]]:
    """Return content for the template; strings stay strings unless they hold media tags.

    What is not used of it is added to `unused`.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        parts = list(media.split_tags(content))
        return content if all(part["type"] == "text" for part in parts) else parts
    if not isinstance(content, list):
        raise BadSample(f"content is {type(content).__name__}, not text or parts.")
    return [_template_part(part, media, unused) for part in content]


def _template_part(part: Any, media: RecordMedia, unused: list[Unused]) -> dict[str, Any]:
    """Return one part of a content for the template; media are added to `media`."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    declared = part.get("type") if isinstance(part, Mapping) else None
    where = f"a part of type {declared}"
    if declared == "text":
        if not isinstance(part.get("text"), str):
            raise BadSample(
                f"a part of type text has no text; its keys are {', '.join(map(str, part))}."
            )
        unused += unused_keys(Fields(where, ("type", "text")), part)
        unused += _unused_tags(part["text"], where)
        return {"type": "text", "text": part["text"]}
    kind = _media_kind_of(part)
    if kind is None:
        raise BadSample(f"a part must be text, image or video, not {declared!r}.")
    key = _reference_key(kind, part)
    unused += unused_keys(Fields(where, ("type", key, *OPTION_NAMES[kind])), part)
    unused += unused_of_reference(kind, part.get(key))
    media.take(kind, part.get(key), part)
    return {"type": kind}


def _media_kind_of(part: Any) -> Kind | None:
    """Return the kind of media that a part of a content is."""
    declared = part.get("type") if isinstance(part, Mapping) else None
    return next((kind for kind in KINDS if declared in (kind, f"{kind}_url")), None)


def _reference_key(kind: Kind, part: Mapping[str, Any]) -> str:
    """Return the key of a part's reference; empty: it takes the next of the record's list."""
    keys = (kind, "path", "url", f"{kind}_url", "bytes", "base64")
    return next((key for key in keys if part.get(key) is not None), "")


def _unused_tags(text: Any, where: str) -> list[Unused]:
    """Return the tags of media in a text where they are not the place of any."""
    tags = TAG.findall(text) if isinstance(text, str) else []
    return [Unused(where, f"<{tag}>", _AS_TEXT) for tag in tags]


def _is_empty(content: str | list[dict[str, Any]]) -> bool:
    if isinstance(content, str):
        return not content.strip()
    return all(part["type"] == "text" and not part["text"].strip() for part in content)
