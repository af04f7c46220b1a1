"""A data set says which turns are trained, by a pattern too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.errors import BadInput
from tests.data.conftest import chat, question
from tests.data.encoding.test_planning import planned, trained_text
from tests.data.encoding.test_rendering_left_out import A, Q, talk
from tests.data.records.test_hooks import END
from tests.data.records.test_tool_calls import ANSWER, CALLED, CALLS, answered, parsed

REASONED = {**A, "reasoning_content": "It is far."}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (".", [1, 1, 1]),
        ("Oslo", [1, 0, 0]),
        ('"name": "weather"', [1, 0, 0]),
        (r"^\{.*\}$", [1, 0, 0]),
        ("^Yo", [0, 1, 1]),
        ("^(?!.*Yo)", [1, 0, 0]),
        ("^(?!.*weather)", [0, 1, 1]),
        ("^(?!.*far)", [1, 1, 1]),
    ],
)
def test_one_text_of_a_turn_decides(pattern: str, expected: list[int]) -> None:
    """Its text, or its calls if it has none: so a pattern that forbids a word means it, too."""
    record = talk(Q, CALLED, ANSWER, REASONED, Q, A)
    weights = parsed(record, Reading(train_on=pattern)).weights
    assert [weights[place] for place in (1, 3, 5)] == expected
    assert sum(weights) == sum(expected)


@pytest.mark.parametrize(
    ("turn", "pattern", "names"),
    [
        (REASONED, "^It", ["its reasoning"]),
        ({**A, "tool_calls": CALLS}, "Oslo", ["its tool calls"]),
        ({**REASONED, "tool_calls": CALLS}, "^(?!.*Yo)", ["its tool calls", "its reasoning"]),
        ({**REASONED, "weight": 0}, "^It", []),
        (answered(tool_calls=CALLS, reasoning_content="Far."), "Far", ["its reasoning"]),
    ],
)
def test_what_else_a_pattern_matches_is_named(turn: Any, pattern: str, names: list[str]) -> None:
    chosen = {**A, "content": "It is not far. Or Oslo."}
    read = parsed(talk(Q, turn, Q, chosen), Reading(train_on=pattern.replace("Far", "[Ff]ar")))
    assert read.weights == [0, 0, 0, 1]
    assert [item.name for item in read.unused] == names
    assert all("train_on matches there and not in the turn's" in item.why for item in read.unused)


@pytest.mark.parametrize("content", ["<think>\nFar.\n</think>\n\n", "Far.</think>"])
def test_a_turn_that_only_thinks_is_chosen_by_its_calls(content: str) -> None:
    thinking = {**A, "content": content}
    for pattern, expected in (("Oslo", 1), ("Far", 0), ("^(?!.*Oslo)", 0)):
        talked = talk(Q, {**thinking, "tool_calls": CALLS}, Q, {**A, "content": "Oslo Far"})
        reading = Reading(train_on=f"(?s)({pattern})|^Oslo F")
        assert parsed(talked, reading).weights == [0, expected, 0, 1]
    assert parsed(talk(Q, thinking), Reading(train_on="Far")).weights == [0, 1]
    assert parsed(talk(Q, {**thinking, "content": content + "x"}), Reading(train_on="Far")).weights


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [("all", ["one", "two yes", "three"]), ("last", ["three"]), (r"\byes$", ["two yes"])],
)
def test_the_turns_that_are_trained_and_the_system_prompt(
    train_on: str, trained: list[str], processor: Any, tmp_path: Path
) -> None:
    talk = chat(
        ("user", "a"), ("assistant", "one"),
        ("user", "b"), ("assistant", "two yes"),
        ("user", "c"), ("assistant", "three"),
    )  # fmt: skip
    reading = Reading(system="Think.", train_on=train_on)
    plan = planned(processor, talk, tmp_path, reading)[0]
    assert trained_text(processor, plan) == [answer + END for answer in trained]
    text = processor.tokenizer.decode(plan.input_ids.tolist())
    assert text.startswith("<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\na")
    own = {"messages": [{"role": "system", "content": "Mine."}, *talk["messages"]]}
    plan, _ = planned(processor, own, tmp_path, reading)
    text = processor.tokenizer.decode(plan.input_ids.tolist())
    assert "Mine." in text
    assert "Think." not in text


def test_no_turn_chosen_and_a_broken_expression(tmp_path: Path) -> None:
    with pytest.raises(BadSample, match="train_on 'x' selects no assistant turn"):
        parse_record(question(0, image=False), MediaFolder(tmp_path, {}), Reading(train_on="x"))
    with pytest.raises(BadInput, match=r"train_on is '\(': neither all nor last"):
        Reading(train_on="(")
