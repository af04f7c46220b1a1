"""Preference records of all forms are read with the right weights, and bad ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import parse_pair, parse_record
from mcore_qwen3vl.data.records.reading import BadSample, Reading, preprocess_record

FOLDER = MediaFolder(Path("/data"), {})
ASKED = {"role": "user", "content": "<image>Which?"}
FIRST = {"role": "assistant", "content": "This."}
AGAIN = {"role": "user", "content": "Sure?"}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def parse(**record: Any) -> dict[str, Conversation]:
    return parse_pair({"images": ["i.png"], **record}, FOLDER)


def test_all_forms_of_a_record_are_one() -> None:
    shared = [ASKED, FIRST, AGAIN]
    forms = [
        parse(messages=shared, chosen="Yes.", rejected="No."),
        parse(messages=shared, chosen=said("Yes."), rejected=[said("No.")]),
        parse(chosen=[*shared, said("Yes.")], rejected=[*shared, said("No.")]),
    ]
    for pair in forms:
        assert pair == forms[0]
        for side in (pair["chosen"], pair["rejected"]):
            assert side.weights == [0, 0, 0, 1]  # the earlier answer is shared, so not trained
            assert [media.name for media in side.media] == ["i.png"]
    assert forms[0]["chosen"].messages[-1]["content"] == "Yes."
    assert forms[0]["rejected"].messages[-1]["content"] == "No."


def test_several_turns_of_their_own_count_unless_their_weight_is_0() -> None:
    end = [said("One.", weight=0), AGAIN, said("Two.")]
    pair = parse(messages=[ASKED], chosen=end, rejected="No.")
    assert pair["chosen"].weights == [0, 0, 0, 1]
    assert pair["rejected"].weights == [0, 1]


def test_the_margin_is_on_the_chosen_side_and_zero_without_one() -> None:
    given: dict[str, Any] = {"messages": [ASKED], "chosen": "a", "rejected": "b"}
    pairs = parse(**given, margin=1.5), parse(**given)
    assert [pair["chosen"].target for pair in pairs] == [1.5, 0.0]
    assert pairs[0]["chosen"].unused == ()


def test_what_a_data_set_says_of_its_records() -> None:
    """A data set's hook makes the record, and its system prompt begins both sides."""
    record = {"asked": "Which?", "good": "This.", "bad": "That."}
    reading = Reading(preprocess=f"{__name__}:as_pair", system="Be brief.")
    pair = parse_pair(preprocess_record(record, reading), FOLDER, reading)
    for side, text in ((pair["chosen"], "This."), (pair["rejected"], "That.")):
        assert [m["role"] for m in side.messages] == ["system", "user", "assistant"]
        assert side.messages[0]["content"] == "Be brief."
        assert str(side.messages[2]["content"]).find(text) >= 0
        assert side.weights == [0.0, 0.0, 1.0]


def as_pair(record: dict[str, str]) -> dict[str, Any]:
    turns = [{"role": "user", "content": record["asked"]}]
    return {"messages": turns, "chosen": record["good"], "rejected": record["bad"]}


def test_it_is_refused_as_a_single_conversation() -> None:
    with pytest.raises(BadSample, match="--loss dpo, simpo or orpo trains on these"):
        parse_record({"messages": [AGAIN], "chosen": "a", "rejected": "b"}, FOLDER)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": [ASKED, FIRST]}, "rejected is missing"),
        ({"messages": [ASKED], "chosen": "a", "rejected": "a"}, "are the same"),
        ({"chosen": "a", "rejected": "b"}, "chosen must be a list of messages"),
        ({"messages": [ASKED], "chosen": 3, "rejected": "b"}, "chosen must be text, a message"),
        ({"messages": [ASKED], "chosen": "a", "rejected": ""}, "rejected: message 2, .* is empty"),
        ({"messages": [ASKED], "chosen": "a", "rejected": "b", "weight": 2}, "has no weight"),
        (
            {"messages": [ASKED], "chosen": said("a", weight=0.5), "rejected": "b"},
            "chosen: .* weight is 0 or 1",
        ),
        (
            {"messages": [ASKED, FIRST], "chosen": [AGAIN], "rejected": [AGAIN, said("b")]},
            "chosen has no assistant turn of its own",
        ),
        (
            {"messages": [AGAIN], "chosen": "a", "rejected": "b"},
            "chosen: 1 images are given",
        ),
        ({"messages": [ASKED], "chosen": "a", "rejected": "b", "margin": "2"}, "margin is '2'"),
    ],
)
def test_flaws_are_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSample, match=message):
        parse(**record)


def test_training_on_single_answers_refuses_pairs() -> None:
    with pytest.raises(BadSample, match="--loss dpo"):
        parse_record({"messages": [AGAIN, FIRST], "chosen": "a", "rejected": "b"}, FOLDER)
