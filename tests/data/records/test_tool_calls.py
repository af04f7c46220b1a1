"""Turns of an agent: tools and calls as JSON text, and calls after reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation, records_of_turns
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import BadSample, Reading
from tests.data.encoding.test_rendering_left_out import A, Q, rendered, talk
from tests.data.records.format_examples import CALL, TEMPLATE, WEATHER
from tests.data.records.published_templates import INSTRUCT, THINKING

CALLS = [{"id": "1", "type": "function", "function": CALL}]
TEXT_ARGUMENTS = {**CALL, "arguments": json.dumps(CALL["arguments"])}
TOOLS = [WEATHER]
FUNCTION = WEATHER["function"]
TEXT_PARAMETERS = {**FUNCTION, "parameters": json.dumps(FUNCTION["parameters"])}


def parsed(record: Any, reading: Reading | None = None) -> Conversation:
    read = parse_record(record, MediaFolder(Path(), {}), reading or Reading())
    assert isinstance(read, Conversation)
    return read


def answered(**more: Any) -> dict[str, Any]:
    return {**A, "content": "", **more}


@pytest.mark.parametrize(
    "calls",
    [
        json.dumps(CALLS),
        [json.dumps(CALLS[0])],
        json.dumps([json.dumps(CALLS[0])]),
        CALLS[0],
        json.dumps(CALLS[0]),
        [{**CALLS[0], "function": json.dumps(CALL)}],
        [{**CALLS[0], "function": TEXT_ARGUMENTS}],
        [json.dumps({**CALLS[0], "function": json.dumps(TEXT_ARGUMENTS)})],
    ],
)
def test_calls_as_text_are_those_as_objects(calls: Any, processor: Any) -> None:
    whole = talk(Q, answered(tool_calls=CALLS), tools=TOOLS)
    as_text = talk(Q, answered(tool_calls=calls), tools=TOOLS)
    for template in (TEMPLATE, INSTRUCT, THINKING):
        expected, result = (rendered(processor, template, record) for record in (whole, as_text))
        assert result == expected
        assert '{"city": "Oslo"}' in result.text


@pytest.mark.parametrize("call", [TEXT_ARGUMENTS, json.dumps(CALL), json.dumps(TEXT_ARGUMENTS)])
def test_older_forms_of_a_call(call: Any, processor: Any) -> None:
    whole = rendered(processor, TEMPLATE, talk(Q, answered(tool_calls=CALLS)))
    older = rendered(processor, TEMPLATE, talk(Q, answered(content=None, function_call=call)))
    assert older == whole
    told = call if isinstance(call, str) else json.dumps(call)
    swift = rendered(processor, TEMPLATE, talk(Q, {"role": "tool_call", "content": told}))
    assert swift == whole


def test_a_call_without_arguments() -> None:
    for arguments in ("", " ", "{}", {}):
        (_, message) = parsed(
            talk(Q, answered(tool_calls=[{"function": {"name": "now", "arguments": arguments}}]))
        ).messages
        assert message["tool_calls"] == [{"function": {"name": "now", "arguments": {}}}]


@pytest.mark.parametrize(
    "given",
    [
        {"tools": json.dumps(TOOLS)},
        {"tools": [json.dumps(WEATHER)]},
        {"tools": [{**WEATHER, "function": json.dumps(FUNCTION)}]},
        {"tools": [{**WEATHER, "function": TEXT_PARAMETERS}]},
        {"functions": [FUNCTION]},
        {"functions": json.dumps([FUNCTION])},
        {"functions": [json.dumps(FUNCTION)]},
        {"functions": json.dumps([TEXT_PARAMETERS]), "tools": ""},
    ],
)
def test_tools_as_text_are_those_as_objects(given: Any) -> None:
    assert parsed(talk(Q, A, **given)).tools == TOOLS


@pytest.mark.parametrize("empty", ["", None])
def test_a_tool_without_parameters(empty: Any) -> None:
    """A table has empty texts, or nulls, for what a tool lacks."""
    tool = {"type": "function", "function": {"name": "now", "parameters": empty}}
    assert parsed(talk(Q, A, tools=json.dumps([tool]))).tools == [tool]
    flat = {"name": "now", "function": empty}
    assert parsed(talk(Q, A, tools=[flat])).tools == [flat]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (talk(Q, answered(tool_calls="x")), "tool_calls of message 2 is text, but not JSON"),
        (talk(Q, answered(tool_calls="3")), "tool_calls of message 2 is int; a list is needed"),
        (talk(Q, answered(tool_calls="null")), "message 2, an assistant turn, is empty"),
        (talk(Q, answered(tool_calls=["[]"])), "a tool call of message 2 has no name"),
        (
            talk(Q, answered(tool_calls=[{"function": "{"}])),
            "a tool call of message 2 is text, but",
        ),
        (
            talk(Q, answered(tool_calls=[{**CALL, "arguments": "Oslo"}])),
            "arguments of a tool call of message 2 is text, but not JSON",
        ),
        (talk(Q, A, functions="["), "functions is text, but not JSON"),
        (talk(Q, A, functions='{"name": "f"}'), "functions is dict; a list is needed"),
        (talk(Q, A, functions=["3"]), "one of functions is int; an object is needed"),
        (talk(Q, A, tools=[{"function": "f"}]), "the function of one of tools is text, but not J"),
    ],
)
def test_what_is_no_call_or_tool(record: Any, message: str) -> None:
    with pytest.raises(BadSample, match=message):
        parsed(record)


THOUGHT = {**A, "content": "<think>\nHm.\n</think>\n\n"}
CALLING = {"role": "tool_call", "content": json.dumps(CALL)}
ANSWER = {"role": "tool_response", "content": "Rain."}


@pytest.mark.parametrize("spoken", ["", "Let me look."])
def test_a_call_goes_on_with_the_turn_before_it(spoken: str, processor: Any) -> None:
    """It is one turn, as if its reasoning, its words and its calls had come in one message."""
    words = {**THOUGHT, "content": THOUGHT["content"] + spoken}
    two = talk(Q, words, CALLING, CALLING, ANSWER, A)
    one = talk(Q, {**words, "tool_calls": [CALLS[0], CALLS[0]]}, ANSWER, A)
    for template in (INSTRUCT, THINKING):
        result, expected = (rendered(processor, template, record) for record in (two, one))
        assert result.text == expected.text
        assert result.text.count("<|im_start|>assistant") == 2
        turns = [result.text[span.start : span.end] for span in result.spans]
        assert turns == [expected.text[span.start : span.end] for span in expected.spans]
        assert "Hm." in turns[0]
        assert turns[0].count("<tool_call>") == 2
    assert [len(r["messages"]) for r in records_of_turns(two)] == [4, 6]
    first, second = records_of_turns(two)
    assert [m.get("weight") for m in first["messages"]] == [None] * 4
    assert [m.get("weight") for m in second["messages"]] == [None, 0, 0, 0, None, None]
    assert parsed(second).weights == [0, 0, 0, 1]


def test_the_parts_of_a_turn_agree() -> None:
    with pytest.raises(BadSample, match="message 3: a tool call must have the weight"):
        parsed(talk(Q, {**THOUGHT, "weight": 0}, CALLING))
    reasoned = {**A, "reasoning_content": "Hm."}
    (_, message) = parsed(talk(Q, reasoned, CALLING)).messages
    assert message["reasoning_content"] == "Hm."
    (_, message) = parsed(talk(Q, A, {**CALLING, "reasoning_content": "So."})).messages
    assert message["reasoning_content"] == "So."
    with pytest.raises(BadSample, match="message 3: reasoning_content is also given in the mess"):
        parsed(talk(Q, reasoned, {**CALLING, "reasoning_content": "So."}))


@pytest.mark.parametrize("before", [A, CALLING])
def test_messages_of_one_turn_may_differ_in_what_no_template_reads(before: Any) -> None:
    """A number of each message, the time of it, and the nulls of a table."""
    numbered = talk(Q, {**before, "id": "1", "time": 1}, {**CALLING, "id": "2", "time": 2})
    assert len(parsed(numbered).messages) == 2
    for first, second in (("Hm.", None), (None, "Hm."), ("Hm.", "Hm.")):
        turns = {**before, "reasoning_content": first}, {**CALLING, "reasoning_content": second}
        assert parsed(talk(Q, *turns)).messages[1]["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"content": "<think>Hm."}, "begins its reasoning with <think> and does not end it"),
        (
            {"content": "<think>a</think>b<think>c"},
            "begins its reasoning with <think> and does not end it",
        ),
        (
            {"content": [{"type": "text", "text": "<think>Hm."}]},
            "begins its reasoning with <think> and does not end it",
        ),
        ({"content": "<think>a</think>b", "reasoning_content": "c"}, "has its reasoning twice"),
        ({"content": "a</think>b", "reasoning_content": "c"}, "has its reasoning twice"),
        ({"content": "<think>a</think>b", "reasoning_content": ""}, "has its reasoning twice"),
    ],
)
def test_reasoning_comes_once_and_ends(turn: Any, message: str, processor: Any) -> None:
    for record in (talk(Q, {**A, **turn}), talk(Q, {**A, **turn, "weight": 0}, Q, A)):
        with pytest.raises(BadSample, match=f"message 2 {message}"):
            rendered(processor, THINKING, record)
    # To a template without reasoning, the tags are text like any other.
    if "reasoning_content" not in turn:
        assert "<think>" in rendered(processor, INSTRUCT, talk(Q, {**A, **turn})).text


@pytest.mark.parametrize("content", ["a</think>b", "<think>a</think>b", "<think>\n\n</think>\n\nb"])
def test_reasoning_that_ends_is_used(content: str, processor: Any) -> None:
    assert "b<|im_end|>" in rendered(processor, THINKING, talk(Q, {**A, "content": content})).text


CALLED = answered(tool_calls=CALLS)


def test_pictures_that_a_tool_answers_are_seen(processor: Any, media: Callable[..., Any]) -> None:
    picture = {"type": "image", "image": f"{media}/0.png"}
    tool = {"role": "tool", "content": [picture, {"type": "text", "text": "a map"}]}
    result = rendered(processor, INSTRUCT, talk(Q, CALLED, tool, A))
    assert "<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>a map" in result.text
    assert len(result.media) == 1


def test_a_message_with_calls_in_both_forms_is_refused() -> None:
    both = answered(tool_calls=CALLS, function_call=TEXT_ARGUMENTS)
    with pytest.raises(BadSample, match="both tool_calls and function_call; keep one"):
        parsed(talk(Q, both))
    one = parsed(talk(Q, answered(tool_calls=[], function_call=TEXT_ARGUMENTS)))
    assert len(one.messages[-1]["tool_calls"]) == 1
