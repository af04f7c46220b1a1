"""Conversations: ``messages`` of OpenAI and ms-swift, ``conversations`` of LLaVA and ShareGPT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import KINDS, Media, MediaFolder, RecordMedia
from mcore_qwen3vl.data.records.reading import weight_of
from mcore_qwen3vl.files import parse_json

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
_GROUNDING = ("<ref-object>", "<bbox>")
_OWN = ("content", "weight", "loss")  # keys of a message that the template does not get
_READ = (*_OWN, "role", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a message that we read or that chat templates do; all but our own get there."""


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


def read_messages(
    record: Mapping[str, Any], folder: MediaFolder, *, prompt: bool = False
) -> Conversation:
    """Read ``messages`` with ``role`` and ``content``: text with or without tags, or parts."""
    turns = []
    for index, message in enumerate(_turns(record, "messages"), 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadSample(f"message {index} must be an object with a role and content.")
        turns.append(_legacy_call(message))
    return _conversation(record, "messages", turns, folder, prompt=prompt)


def read_conversations(record: Mapping[str, Any], folder: MediaFolder) -> Conversation:
    """Read ``conversations`` with ``from`` and ``value``, and optionally a ``system`` text."""
    turns = []
    for index, turn in enumerate(_turns(record, "conversations"), 1):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str):
            raise BadSample(f"turn {index} must be an object with from and value.")
        if not isinstance(turn.get("value"), str):
            raise BadSample(
                f"turn {index}: value is {type(turn.get('value')).__name__}; text is needed."
            )
        kept = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turns.append({**kept, "role": turn["from"], "content": turn["value"]})
    return _conversation(record, "conversations", turns, folder)


def _turns(record: Mapping[str, Any], key: str) -> list[Any]:
    turns = unpacked(record[key], key)
    if not isinstance(turns, list) or not turns:
        raise BadSample(f"{key} must be a list of at least one message.")
    return turns


def unpacked(value: Any, key: str) -> Any:
    """Return the value of `key`, parsed if it is text: tables keep nested values as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise BadSample(f"{key} is text, but not JSON: {error}.") from error


def _conversation(
    record: Mapping[str, Any],
    key: str,
    turns: Sequence[Mapping[str, Any]],
    folder: MediaFolder,
    *,
    prompt: bool = False,
) -> Conversation:
    media = RecordMedia(record, folder)
    sample_weight = weight_of(record)
    rendered: list[dict[str, Any]] = []
    weights: list[float] = []
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
    previous = None
    for index, turn in enumerate(turns, 1):
        role = _ROLES[key].get(turn["role"])
        if role is None:
            raise BadSample(
                f"message {index}: the role {turn['role']!r:.40} is not known; use one "
                f"of {', '.join(_ROLES[key])}."
            )
        message = _message(turn, role, index, media)
        # A zero in either of them masks a turn.
        weight = weight_of(turn) * weight_of(turn, "loss") * sample_weight
        if role == previous == _CALL:  # consecutive calls are one assistant turn
            if weight != weights[-1]:
                raise BadSample(
                    f"message {index}: consecutive tool calls must have the same weight."
                )
            rendered[-1]["tool_calls"] += message["tool_calls"]
        else:
            rendered.append(message)
            weights.append(weight if message["role"] == "assistant" else 0.0)
        previous = role
    media.check_empty()
    if not (prompt or any(weights)):
        raise BadSample("no assistant turn has a weight above 0, so nothing would be trained.")
    unread = {str(name): None for turn in turns for name in turn if name not in _READ}
    return Conversation(
        rendered, media.media, weights, _tools(record), prompt,
        unread=tuple(f"{name} of a message" for name in unread),
    )  # fmt: skip


def _message(turn: Mapping[str, Any], role: str, index: int, media: RecordMedia) -> dict[str, Any]:
    kept = {name: value for name, value in turn.items() if name not in _OWN}
    if role == _CALL:
        return {**kept, "role": "assistant", "content": "", "tool_calls": _calls(turn, index)}
    if turn.get("content") is None and role != "assistant":
        raise BadSample(
            f"message {index} has no content; its keys are {', '.join(map(str, turn))}."
        )
    content = _content(turn.get("content"), index, media)
    if role == "assistant" and _is_empty(content) and not turn.get("tool_calls"):
        raise BadSample(f"message {index}, an assistant turn, is empty.")
    return {**kept, "role": role, "content": content}


def _legacy_call(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `message` with OpenAI's older ``function_call`` rewritten as ``tool_calls``."""
    call = message.get("function_call")
    if call is None:
        return message
    kept = {name: value for name, value in message.items() if name != "function_call"}
    return {**kept, "tool_calls": [{"type": "function", "function": call}]}


def _calls(turn: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    """Return the calls of a turn whose text is ``{"name": ..., "arguments": ...}``, or a list."""
    said = unpacked(turn.get("content"), f"message {index}, a tool call,")
    calls = said if isinstance(said, list) else [said]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise BadSample(f"message {index}, a tool call, has no name.")
    if not calls:
        raise BadSample(f"message {index}, a tool call, is empty.")
    return [
        {
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments", {})},
        }
        for call in calls
    ]


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    given = record.get("tools")
    if given is None and record.get("functions") is not None:  # OpenAI's older form
        return [{"type": "function", "function": one} for one in record["functions"]]
    if given is None or given == "":
        return None
    tools = unpacked(given, "tools")
    if not isinstance(tools, list):
        raise BadSample(f"tools is {type(tools).__name__}; a list is needed.")
    return [unpacked(tool, "a tool") for tool in tools] or None


def _content(content: Any, index: int, media: RecordMedia) -> str | list[dict[str, Any]]:
    """Return content for the template; strings stay strings unless they hold media tags."""
    if content is None:
        return ""
    if isinstance(content, str):
        if found := next((tag for tag in _GROUNDING if tag in content), None):
            raise BadSample(
                f"message {index}: {found} is not replaced from objects; write its text out."
            )
        parts = list(media.split_tags(content))
        return content if all(part["type"] == "text" for part in parts) else parts
    if not isinstance(content, list):
        raise BadSample(f"message {index}: content is {type(content).__name__}, not text or parts.")
    return [_part(part, index, media) for part in content]


def _part(part: Any, index: int, media: RecordMedia) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    declared = part.get("type") if isinstance(part, Mapping) else None
    if declared == "text":
        if not isinstance(part.get("text"), str):
            raise BadSample(
                f"message {index}: a part of type text has no text; its keys are "
                f"{', '.join(map(str, part))}."
            )
        return {"type": "text", "text": part["text"]}
    kind = next((kind for kind in KINDS if declared in (kind, f"{kind}_url")), None)
    if kind is None:
        raise BadSample(f"message {index}: a part must be text, image or video, not {declared!r}.")
    keys = (kind, "path", "url", f"{kind}_url", "bytes", "base64")
    media.take(kind, next((part[key] for key in keys if part.get(key) is not None), None), part)
    return {"type": kind}


def _is_empty(content: str | list[dict[str, Any]]) -> bool:
    if isinstance(content, str):
        return not content.strip()
    return all(part["type"] == "text" and not part["text"].strip() for part in content)
