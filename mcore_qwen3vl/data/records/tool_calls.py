"""The tools offered by a record, and the calls of its turns, in the form that templates read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_qwen3vl.data.records.nested import parse_nested, rows_of
from mcore_qwen3vl.data.records.reading import BadSample, unused_keys
from mcore_qwen3vl.unused.fields import Fields, Unused

_CALLED = Fields("a tool call", ("name", "arguments"))


def with_tool_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `message` with OpenAI's older ``function_call`` rewritten as ``tool_calls``.

    Raises:
        BadSample: it has both.
    """
    call = message.get("function_call")
    if call is None or call == "":
        return message
    if message.get("tool_calls") not in (None, "", [], "[]", "null"):
        raise BadSample("a message has both tool_calls and function_call; keep one of them.")
    kept = {name: value for name, value in message.items() if name != "function_call"}
    return {**kept, "tool_calls": [{"type": "function", "function": call}]}


def parse_calls_in_text(
    turn: Mapping[str, Any], index: int, unused: list[Unused]
) -> list[dict[str, Any]]:
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


def parse_tool_calls(value: Any, index: int) -> list[dict[str, Any]]:
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


def parse_tools(record: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that the record offers; each level of them may be JSON text."""
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
