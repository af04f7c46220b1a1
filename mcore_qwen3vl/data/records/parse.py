"""Parsing of a record of any format, which is recognised by its keys: a conversation or a document.

The formats are ``messages`` of OpenAI and ms-swift, ``conversations`` of LLaVA and ShareGPT, and
documents: text with images between, or with images and videos before it. A data set's hook rewrites
records of other kinds. Names and boxes of ``objects`` take the place of their tags, as in
ms-swift's grounding data. Records for other tasks are parsed by
:mod:`mcore_qwen3vl.data.records.tasks`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from mcore_qwen3vl.data.records.media import (
    KINDS,
    OPTION_NAMES,
    TAG,
    Kind,
    Media,
    MediaFolder,
    RecordMedia,
    image_size,
    media_list,
    options_of_all,
    unused_of_lists,
    unused_of_reference,
)
from mcore_qwen3vl.data.records.reading import (
    PLAIN,
    BadSample,
    Observed,
    Reading,
    parse_template_kwargs,
    require_number,
    unused_keys,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import parse_json
from mcore_qwen3vl.functions import RULE, find_function
from mcore_qwen3vl.unused.fields import Fields, Unused

CAPTION_KEYS = ("caption", "text", "txt")
_IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
_VIDEO_SUFFIXES = ("mp4", "mkv", "webm", "mov", "avi")


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
    that is labelled as wanted, else 0; or 1 for each label of a classifier that is right, else 0.
    """
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, over those of the data set."""
    format: str = field(default="", compare=False)  # format of the record
    unused: tuple[Unused, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Document:
    """Interleaved text and media, all of whose text is trained."""

    parts: list[str | Media]
    weight: float = 1.0
    format: str = field(default="", compare=False)  # format of the record
    unused: tuple[Unused, ...] = field(default=(), compare=False)

    @property
    def media(self) -> list[Media]:
        return [part for part in self.parts if isinstance(part, Media)]


Parsed = Conversation | Document


def parse_record(record: Any, folder: MediaFolder, reading: Reading = PLAIN) -> Parsed:
    """Read a JSON record of any of :data:`FORMATS`."""
    record = preprocess_record(record, reading)
    form = format_of(record, reading.format)
    parsed = read_observed(record, form.name, lambda seen: form.read(seen, folder))
    return _select_turns(parsed, reading) if isinstance(parsed, Conversation) else parsed


GROUP = "mcore_qwen3vl.preprocess"
"""The group of entry points under which packages register hooks."""

Hook = Callable[[Any], Any]
"""A user's function from a record of any kind to a record in a known format."""


def preprocess_record(record: Any, reading: Reading) -> Mapping[str, Any]:
    """Return the record as the data set's hook rewrites it.

    Raises:
        BadSample: the hook returned None, or the record is no JSON object. The hook's own
            exceptions pass through.
    """
    if reading.preprocess is not None:
        record = find_hook(reading.preprocess)(record)
        if record is None:
            raise BadSample(f"{reading.preprocess} returned None for it.")
    if not isinstance(record, Mapping):
        raise BadSample(f"a record must be a JSON object, this is {type(record).__name__}.")
    return record


@cache
def find_hook(name: str) -> Hook:
    """Return a hook by its name: an entry point of :data:`GROUP`, or see :mod:`.functions`.

    Raises:
        BadInput: the hook cannot be imported, or is not a function.
    """
    entry = next((e for e in entry_points(group=GROUP) if e.name == name), None)
    if entry is None and ":" not in name:
        raise BadInput(
            f"--preprocess {name}: no installed package has registered a function of this name. "
            f"Name it {RULE}."
        )
    try:
        named = name if entry is None else f"{entry.module}:{entry.attr}"
        return find_function(named, "record")
    except BadInput as error:
        raise BadInput(f"--preprocess {error}") from error


def read_observed[P](
    record: Mapping[str, Any], format: str, read: Callable[[Mapping[str, Any]], P]
) -> P:
    """Return what `read` makes of a record, with the format's name and what is not used of it."""
    seen = Observed(record)
    parsed: Any = read(seen)
    made: P = replace(parsed, format=format, unused=(*seen.unused, *parsed.unused))
    return made


def _select_turns(parsed: Conversation, reading: Reading) -> Conversation:
    """Add the data set's system prompt, and choose the turns to train on."""
    weights, left = _weights_of_turns(parsed, reading.train_on)
    if not any(weights):
        raise BadSample(f"train_on {reading.train_on!r} selects no assistant turn.")
    messages = reading.add_system_prompt(parsed.messages)
    # The system prompt that was added has a weight too.
    weights = [0.0] * (len(messages) - len(weights)) + weights
    unused = tuple(dict.fromkeys((*parsed.unused, *left)))
    return replace(parsed, messages=messages, weights=weights, unused=unused)


def _weights_of_turns(
    parsed: Conversation, train_on: str | None
) -> tuple[list[float], list[Unused]]:
    """Return the messages' weights, with 0 for turns that `train_on` does not choose.

    Of turns whose text a pattern does not match, what else it matches is returned too.
    """
    if train_on in (None, "all"):
        return parsed.weights, []
    if train_on == "last":
        last = max(i for i, m in enumerate(parsed.messages) if m["role"] == "assistant")
        return [weight if i == last else 0.0 for i, weight in enumerate(parsed.weights)], []
    weights: list[float] = []
    unused: list[Unused] = []
    for message, weight in zip(parsed.messages, parsed.weights, strict=True):
        # One text decides, so that a pattern that forbids a word means it, too.
        said, *others = _texts_of(message)
        chosen = re.search(train_on, said[1]) is not None
        weights.append(weight if chosen else 0.0)
        if weight and not chosen:
            why = f"train_on matches there and not in the turn's {said[0]}, which decides"
            unused += [
                Unused("a turn of the assistant", f"its {what}", why)
                for what, text in others
                if re.search(train_on, text)
            ]
    return weights, unused


_THINKING = re.compile(r"(<think>)?.*?</think>", re.DOTALL)


def _texts_of(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a model says in a turn, and what it is: text, tool calls, and reasoning.

    The first decides for a pattern: the text, which may hold reasoning too, or what there is in a
    turn without any.
    """
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    reasoning = message.get("reasoning_content")
    spoken = _THINKING.sub("", content, count=1).strip()
    texts = [
        ("text", content if spoken else ""),
        ("tool calls", " ".join(json.dumps(call, ensure_ascii=False) for call in calls)),
        ("reasoning", reasoning if isinstance(reasoning, str) and reasoning else ""),
        ("reasoning", "" if spoken else content),
    ]
    return [(what, text) for what, text in texts if text] or [("text", "")]


def join_parts(parts: Mapping[str, Any], record: Any) -> Any:
    """Return a WebDataset sample's record, with its media and caption filled in from its parts."""
    if record is not None and not isinstance(record, Mapping):
        return record
    if record is None and (dotted := sorted(name for name in parts if name.endswith(".json"))):
        raise BadSample(
            f"its parts are {', '.join(dotted)[:200]}: in a tar, the name of a sample ends at its "
            "first dot, so that files with further dots in their names become one sample. Write "
            "the names with _ in place of those dots."
        )
    record = dict(record or {})
    if {"messages", "conversations", "texts", "chosen", "query", "completion"} & record.keys():
        return record
    for kind in KINDS:
        names = sorted(name for name in parts if media_kind(name) == kind)
        if names and f"{kind}s" not in record and kind not in record:
            record[f"{kind}s"] = names
    if "text" not in record and "txt" in parts:
        record["text"] = parts["txt"].decode("utf-8")
    return record


def media_kind(name: str) -> Kind | None:
    """Return the kind of media that a file name's suffix stands for; None if neither kind."""
    suffix = name.rsplit(".", 1)[-1].lower()
    if suffix in _IMAGE_SUFFIXES:
        return "image"
    return "video" if suffix in _VIDEO_SUFFIXES else None


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
_OWN = ("content", "weight", "loss")  # keys of a message that the template does not get
MESSAGE = Fields(
    "a message",
    (*_OWN, "role", "name", "tool_calls", "tool_call_id", "reasoning_content"),
    inert=("id",),
)
"""Keys of a message that we read or that chat templates do; all but our own get there."""
_PROMPT_TURN = Fields(
    "a message that is not the assistant's",
    (),
    without_effect={"weight": (0, 0.0), "loss": (False, 0, 0.0)},
    reasons=dict.fromkeys(("weight", "loss"), "only turns of the assistant are trained"),
)
_AS_TEXT = "text there"  # what becomes of a tag where it is not the place of any media
_KEYS_OF_OTHER_TASKS = {"chosen", "rejected", "label", "query", "positive", "positive_messages"}
_CALLED = Fields("a tool call", ("name", "arguments"))


def read_messages(
    record: Mapping[str, Any], folder: MediaFolder, *, prompt: bool = False
) -> Conversation:
    """Read ``messages`` with ``role`` and ``content``: text with or without tags, or parts."""
    turns = []
    for index, message in enumerate(_require_turns(record, "messages"), 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadSample(f"message {index} must be an object with a role and content.")
        turns.append(_with_tool_calls(message))
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
    speaker, text = ("role", "content") if key == "messages" else ("from", "value")
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
        if answers and not goes_on and _weight_of(turn) * _weight_of(turn, "loss") > 0:
            start = len(prompt)
            # The messages before that are of the same turn keep their weights.
            while start and _is_same_turn(roles[start - 1], roles[start]):
                start -= 1
            messages = [*prompt[:start], *turns[start : len(prompt) + 1]]
            records.append({**_with_used_media_only(record, messages, text), key: messages})
        prompt.append({**turn, "weight": 0} if answers else turn)
    return records or [record]


def _with_used_media_only(
    record: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], text: str
) -> dict[str, Any]:
    """Return the record with only the images, videos and objects that the messages use."""
    contents = [message.get(text) for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    texts = [
        *(content for content in contents if isinstance(content, str)),
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
    if isinstance(objects := record.get("objects"), Mapping):
        kinds = [kind for text in texts for kind in _TAGS.findall(text)]
        counts = {"ref": kinds.count("ref-object"), "bbox": kinds.count("bbox")}
        counts["image_id"] = counts["bbox"]
        trimmed = {name: objects[name][:count] for name, count in counts.items() if name in objects}
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


@dataclass(frozen=True)
class NestedForm:
    """A list that may stand where text may stand too, and so may be JSON text there.

    Text that is an answer may be JSON of any kind. So only what has this form is taken for a list.
    """

    name: str
    is_met_by: Callable[[Any], bool]
    begins: re.Pattern[str] | None
    """The beginning of text that is meant as such a list, although it is no JSON."""
    literally: str
    """How text of this form is written that is meant as text."""

    def parse(self, value: Any, key: str) -> Any:
        """Return what the value of `key` stands for: the list, if it is that as JSON text.

        Raises:
            BadSample: the text begins as such a list does, and is no JSON.
        """
        if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
            return value
        try:
            parsed = parse_json(value)
        except ValueError as error:
            if self.begins is None or not self.begins.match(value):
                return value
            raise BadSample(
                f"{key} is text that begins as a list of {self.name} does, but is not JSON: "
                f"{error}. Write the list, or JSON. Text that is meant as text is written as "
                f"{self.literally}."
            ) from error
        return parsed if self.is_met_by(parsed) else value


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


def parse_nested(value: Any, key: str) -> Any:
    """Return the value of `key`, parsed if it is text: tables keep nested values as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise BadSample(f"{key} is text, but not JSON: {error}.") from error


_OF_ROWS = ("role", "from", "function", "name")
"""Keys of messages and calls, which have a list in a struct of lists alone."""


def rows_of(value: Any, key: str) -> Any:
    """Return the list of objects that a struct of lists stands for; other values as they are.

    ``datasets`` keeps a list of objects so: ``{"role": ["user", ...], "content": ["Hi", ...]}``.
    """
    if not isinstance(value, Mapping) or not any(isinstance(value.get(k), list) for k in _OF_ROWS):
        return value
    columns = {name: column for name, column in value.items() if column is not None}
    if not all(isinstance(column, list) for column in columns.values()) or (
        len({len(column) for column in columns.values()}) > 1
    ):
        raise BadSample(f"{key} is a struct of lists, of which each must have the same length.")
    rows = (zip(columns, row, strict=True) for row in zip(*columns.values(), strict=True))
    return [{name: cell for name, cell in row if cell is not None} for row in rows]


def _weight_of(holder: Mapping[str, Any], key: str = "weight") -> float:
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
    sample_weight = _weight_of(record)
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
        weight = _weight_of(turn) * _weight_of(turn, "loss") * sample_weight
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
    unused += _ground_messages(record, rendered, media.media)
    if not (prompt or any(weights)):
        raise BadSample("no assistant turn has a weight above 0, so nothing would be trained.")
    return Conversation(
        rendered,
        media.media,
        weights,
        _parse_tools(record),
        prompt,
        chat_template_kwargs=_template_kwargs(record),
        unused=tuple(dict.fromkeys(unused)),
    )


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


def _ground_messages(
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
        if isinstance(holder.get(key), str) and _TAGS.search(holder[key])
    ]
    if not texts:
        return []
    images = [medium for medium in media if medium.kind == "image"]
    objects = parse_nested(record.get("objects"), "objects")
    try:
        placed, unused = _ground_texts([holder[key] for _, holder, key in texts], objects, images)
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
        kept["tool_calls"] = _parse_tool_calls(kept["tool_calls"], index)
    unused = unused_keys(MESSAGE, turn)
    unused += _unused_tags(turn.get("reasoning_content"), "reasoning_content")
    if role == _CALL:
        calls = _parse_calls(turn, index, unused)
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


def _with_tool_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `message` with OpenAI's older ``function_call`` rewritten as ``tool_calls``."""
    call = message.get("function_call")
    if call is None or call == "":
        return message
    kept = {name: value for name, value in message.items() if name != "function_call"}
    return {**kept, "tool_calls": [{"type": "function", "function": call}]}


def _parse_calls(turn: Mapping[str, Any], index: int, unused: list[Unused]) -> list[dict[str, Any]]:
    """Return the calls of a turn whose text is ``{"name": ..., "arguments": ...}``, or a list."""
    where = f"message {index}, a tool call,"
    said = parse_nested(turn.get("content"), where)
    calls = [_parse_function(call, where) for call in (said if isinstance(said, list) else [said])]
    if not calls:
        raise BadSample(f"message {index}, a tool call, is empty.")
    for call in calls:
        unused += unused_keys(_CALLED, call)
    return [
        {
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments", {})},
        }
        for call in calls
    ]


def _parse_tool_calls(value: Any, index: int) -> list[dict[str, Any]]:
    """Return ``tool_calls`` of OpenAI's form, of which each level may be JSON text."""
    where = f"a tool call of message {index}"
    key = f"tool_calls of message {index}"
    calls = rows_of(parse_nested(value, key), key)
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list | None):
        raise BadSample(
            f"tool_calls of message {index} is {type(calls).__name__}; a list is needed."
        )
    parsed = []
    for given in calls or []:
        call = parse_nested(given, where)
        if isinstance(call, Mapping) and call.get("function") is not None:
            parsed.append({**call, "function": _parse_function(call["function"], where)})
        else:
            parsed.append(_parse_function(call, where))
    return parsed


def _parse_function(value: Any, where: str) -> dict[str, Any]:
    """Return a function that is called, with its arguments as an object.

    OpenAI has the arguments as text. Templates that write each argument apart need the object, and
    servers give it to all templates.
    """
    function = parse_nested(value, where)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadSample(f"{where} has no name.")
    if not isinstance(arguments := function.get("arguments"), str):
        return dict(function)
    parsed = parse_nested(arguments, f"arguments of {where}") if arguments.strip() else {}
    return {**function, "arguments": parsed}


def _parse_tools(record: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that the record offers, of which each level may be JSON text."""
    key = "tools"
    if record.get(key) in (None, "") and record.get("functions") is not None:
        key = "functions"  # OpenAI's older form
    value = record.get(key)
    if value is None or value == "":
        return None
    tools = rows_of(parse_nested(value, key), key)
    if not isinstance(tools, list):
        raise BadSample(f"{key} is {type(tools).__name__}; a list is needed.")
    parsed = [_parse_tool(tool, f"one of {key}") for tool in tools]
    if key == "functions":
        parsed = [{"type": "function", "function": function} for function in parsed]
    return parsed or None


def _template_kwargs(record: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return parse_template_kwargs(record.get("chat_template_kwargs"))
    except BadInput as error:
        raise BadSample(str(error)) from error


def _parse_tool(value: Any, where: str) -> Any:
    """Return the definition of a tool, with the objects in it that are given as JSON text."""
    tool = parse_nested(value, where)
    if not isinstance(tool, Mapping):
        raise BadSample(f"{where} is {type(tool).__name__}; an object is needed.")
    tool = dict(tool)
    if tool.get("function") not in (None, ""):
        tool["function"] = _parse_tool(tool["function"], f"the function of {where}")
    if tool.get("parameters") not in (None, ""):  # tables have empty texts for what is missing
        tool["parameters"] = parse_nested(tool["parameters"], f"parameters of {where}")
    return tool


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


def read_interleaved(record: Mapping[str, Any], folder: MediaFolder) -> Document:
    """Read ``texts`` and ``images``: equally long lists, with one of the two null at each place."""
    texts, images = record["texts"], record.get("images")
    if not isinstance(texts, list) or not isinstance(images, list | None):
        raise BadSample("texts and images must be lists.")
    if images is None:
        images = [None] * len(texts)
    if len(texts) != len(images):
        raise BadSample(f"texts has {len(texts)} entries and images {len(images)}; pad with null.")
    parts: list[str | Media] = []
    for index, (text, image) in enumerate(zip(texts, images, strict=True)):
        if (text is None) == (image is None):
            raise BadSample(f"entry {index}: exactly one of texts and images must be null.")
        if image is None and not isinstance(text, str):
            raise BadSample(f"entry {index}: texts holds {type(text).__name__}, not text.")
        if image is None and any(images) and (tag := TAG.search(text)):
            raise BadSample(
                f"entry {index}: {tag[0]} in texts: the lists give the places of images, so take "
                "the tag out."
            )
        parts.append(text if image is None else folder.resolve("image", image))
    return _make_document(parts, record)


def read_caption(record: Mapping[str, Any], folder: MediaFolder) -> Document:
    """Read ``text``, ``caption`` or ``txt``, with images and videos before it."""
    text = next((record[key] for key in CAPTION_KEYS if record.get(key) is not None), None)
    if not isinstance(text, str):
        raise BadSample(f"{' or '.join(CAPTION_KEYS)} must be text.")
    parts: list[str | Media] = []
    if TAG.search(text) and any(media_list(record, kind) for kind in KINDS):
        media = RecordMedia(record, folder)
        for piece in media.split_tags(text):
            parts.append(piece["text"] if piece["type"] == "text" else media.media[-1])
        media.check_all_used({})
        return _make_document(parts, record)
    options = options_of_all(record)
    for kind in KINDS:
        for reference in media_list(record, kind):
            parts.append(folder.resolve(kind, reference, options))
    return _make_document([*parts, text], record)


def _make_document(parts: list[str | Media], record: Mapping[str, Any]) -> Document:
    """Make a document; without media or objects, the tags for them are text like any other."""
    texts = [part for part in parts if isinstance(part, str)]
    if not any(text.strip() for text in texts):
        raise BadSample("the document holds no text.")
    unused = unused_of_lists(record)
    if any(map(_TAGS.search, texts)) and record.get("objects") is not None:
        images = [part for part in parts if isinstance(part, Media) and part.kind == "image"]
        texts, left = _ground_texts(texts, parse_nested(record["objects"], "objects"), images)
        unused += left
        rest = iter(texts)
        parts = [next(rest) if isinstance(part, str) else part for part in parts]
    tags = [tag for text in texts for tag in (*TAG.finditer(text), *_TAGS.finditer(text))]
    unused += [Unused("a document", tag[0], "trained as text") for tag in tags]
    return Document(parts, _weight_of(record), unused=tuple(dict.fromkeys(unused)))


@dataclass(frozen=True)
class RecordFormat:
    """A format of records."""

    name: str
    keys: tuple[str, ...]  # a record that has one of them is of this format
    read: Callable[[Mapping[str, Any], MediaFolder], Parsed]


FORMATS = (
    RecordFormat("messages", ("messages",), read_messages),
    RecordFormat("conversations", ("conversations",), read_conversations),
    RecordFormat("interleaved", ("texts",), read_interleaved),
    RecordFormat("caption", CAPTION_KEYS, read_caption),
)
"""The formats in order: a record has the first one of which it has a key."""


_PAIRED = (
    "belongs to preference data, of which this would train the first answer alone. --loss dpo, "
    "simpo or orpo trains on both, from chosen and rejected, which --preprocess MODULE:FUNCTION "
    "can write; without this key the answer is trained as any other."
)
PAIRED_ELSEWHERE = ("rejected_response", "rejected_messages", "rejected_images")
"""Keys of other programs' preference records."""
OTHER_TASKS = {
    **dict.fromkeys(PAIRED_ELSEWHERE, _PAIRED),
    "label": "is true or false, which tells wanted answers from unwanted ones: this would train "
    "both alike. --loss kto trains on such records; or take the key out of records to train on.",
}
"""Keys of records that are made for another task than training on their answers. ``label`` is one
only if it is true or false: data sets of other kinds have numbers and words there."""
SIDES = ("chosen", "rejected")


def is_preference(record: Mapping[str, Any]) -> bool:
    """Return whether a JSON record is a preference record, even one that lacks a side."""
    return any(side in record for side in SIDES)


RETRIEVED = ("positive", "positive_messages")
"""Keys of retrieval records."""


def is_retrieval(record: Mapping[str, Any]) -> bool:
    """Return whether a JSON record is a retrieval record."""
    return any(key in record for key in RETRIEVED)


def format_of(record: Mapping[str, Any], name: str | None = None) -> RecordFormat:
    """Return the format of a JSON record."""
    if is_preference(record):
        raise BadSample(
            "it is a preference record: --loss dpo, simpo or orpo trains on these, and --task "
            "reward."
        )
    if is_retrieval(record):
        raise BadSample(
            "it is a retrieval record: --task embedding and --task reranker train on these."
        )
    for key, advice in OTHER_TASKS.items():
        value = record.get(key)
        if isinstance(value, bool) or (key != "label" and value):
            raise BadSample(f"{key} {advice}")
    offered = [form for form in FORMATS if name in (None, form.name)]
    for form in offered:
        if any(record.get(key) is not None for key in form.keys):
            return form
    wanted = ", ".join(key for form in offered for key in form.keys)
    raise BadSample(
        f"the record has the keys {', '.join(map(str, record))[:80]}; none of {wanted}, nor "
        "chosen, rejected (preference data), label that is true or false (--loss kto) or positive "
        "(retrieval data). For records of another kind, name a function that rewrites them: "
        "--preprocess MODULE:FUNCTION."
    )


_TAGS = re.compile("<(ref-object|bbox)>")
"""The place of an object's name or box in a text."""
_SCALE = 1000
"""Qwen3-VL writes coordinates in thousandths of an image's width and height."""
_FIELDS = Fields("objects", ("ref", "bbox", "bbox_type", "image_id"))
_TYPES = ("real", "norm1", "norm1000")


def _ground_texts(
    texts: Sequence[str], objects: Any, images: Sequence[Media]
) -> tuple[list[str], list[Unused]]:
    """Return the texts of a record with its objects in place of the tags, and what is not used.

    Args:
        objects: the value of the record's key: ``ref``, the names in the order of their tags, and
            ``bbox``, as many numbers x, y, x, y, ... as a box, point or polygon has. They are
            pixels of an image's file, upright; with ``bbox_type`` norm1 or norm1000 they are parts
            of its width and height. ``image_id`` has the index of each one's image; the default
            is 0.
        images: the record's images, in order.

    Raises:
        BadSample: there are other numbers of tags and objects, or a box is not inside its image.
    """
    kinds = [kind for text in texts for kind in _TAGS.findall(text)]
    if not kinds:
        return list(texts), []
    if not isinstance(objects, Mapping):
        raise BadSample(
            f"<{kinds[0]}> takes its text from objects, an object with ref and bbox; the record "
            f"has {'none' if objects is None else type(objects).__name__}. Write the text out, or "
            "add them."
        )
    written = {"ref-object": _object_names(objects), "bbox": _box_texts(objects, images)}
    for (kind, values), key in zip(written.items(), ("ref", "bbox"), strict=True):
        if kinds.count(kind) != len(values):
            raise BadSample(
                f"there are {kinds.count(kind)} tags <{kind}> and {len(values)} entries in {key} "
                "of objects."
            )
    left = {kind: iter(values) for kind, values in written.items()}
    placed = [_TAGS.sub(lambda tag: next(left[tag[1]]), text) for text in texts]
    return placed, unused_keys(_FIELDS, objects)


def _object_names(objects: Mapping[str, Any]) -> list[str]:
    names = objects.get("ref") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadSample("ref of objects must be a list of texts.")
    return names


def _box_texts(objects: Mapping[str, Any], images: Sequence[Media]) -> list[str]:
    """Return the record's boxes as the text that Qwen3-VL writes for them."""
    boxes, indices = objects.get("bbox") or [], objects.get("image_id") or []
    kind = objects.get("bbox_type") or "real"
    if kind not in _TYPES:
        raise BadSample(f"bbox_type of objects is {kind!r:.40}; one of {', '.join(_TYPES)}.")
    if not isinstance(boxes, list) or not isinstance(indices, list):
        raise BadSample("bbox and image_id of objects must be lists.")
    indices = [*indices, *[0] * (len(boxes) - len(indices))]
    if len(indices) != len(boxes):
        raise BadSample(f"objects has {len(indices)} image_id for {len(boxes)} bbox.")
    written = []
    for box, index in zip(boxes, indices, strict=True):
        if kind != "real":
            size = (1, 1) if kind == "norm1" else (_SCALE, _SCALE)
        elif isinstance(index, int) and 0 <= index < len(images):
            size = image_size(images[index])
        else:
            raise BadSample(f"image_id {index!r:.40} of objects: there are {len(images)} images.")
        written.append(_box_text(box, *size))
    return written


def _box_text(box: Any, height: int, width: int) -> str:
    """Return a box in thousandths, as ``[x, y, x, y]``, of one in an image of that size."""
    if not isinstance(box, list) or not box or len(box) % 2:
        raise BadSample(f"a bbox of objects is {box!r:.60}; a list of x, y, x, y is needed.")
    numbers = [require_number("a coordinate of bbox", value, least=0) for value in box]
    limits = [width, height] * (len(box) // 2)
    if any(value > limit for value, limit in zip(numbers, limits, strict=True)):
        raise BadSample(f"bbox {box!r:.60} of objects is not inside {width} x {height}.")
    scaled = [round(value / limit * _SCALE) for value, limit in zip(numbers, limits, strict=True)]
    return f"[{', '.join(map(str, scaled))}]"
