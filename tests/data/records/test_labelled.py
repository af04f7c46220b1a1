"""Labelled records of all forms are read with the right weights, and bad ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import is_labelled, parse_labelled, parse_record
from mcore_qwen3vl.data.records.reading import PLAIN, BadSample, Reading

FOLDER = MediaFolder(Path("/data"), {})
ASKED = {"role": "user", "content": "<image>Which?"}
SAID = {"role": "assistant", "content": "This."}


def parse(reading: Reading = PLAIN, **record: Any) -> Conversation:
    record = {"images": ["i.png"], "label": False, **record}
    assert is_labelled(record)
    return parse_labelled(record, FOLDER, reading)


def test_all_forms_of_a_record_are_one() -> None:
    forms = [
        parse(prompt="<image>Which?", completion="This."),
        parse(prompt=ASKED, completion=SAID),
        parse(prompt=[ASKED], completion=[SAID]),
        parse(messages=[ASKED, SAID]),
    ]
    for found in forms:
        assert found == forms[0]
        assert (found.label, found.format) == (False, "labelled")
        assert found.weights == [0, 1]
        assert [media.name for media in found.media] == ["i.png"]
    assert parse(messages=[ASKED, SAID], label=True).label is True


def test_only_the_answer_counts_and_the_system_prompt_begins() -> None:
    messages = [ASKED, SAID, {"role": "user", "content": "Sure?"}, SAID]
    found = parse(Reading(system="Be brief.", train_on="all"), messages=messages)
    assert found.weights == [0, 0, 0, 0, 1]
    assert found.messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "<image>Which?"}, "needs prompt and completion, or messages"),
        ({"messages": [SAID]}, "needs prompt and completion, or messages"),
        ({"messages": [SAID, ASKED]}, "completion.* no assistant turn"),
        ({"prompt": 3, "completion": "This."}, "prompt must be text, a message or"),
        ({"prompt": "Which?", "completion": "<image>"}, "the answer has an image"),
        ({"messages": [ASKED, SAID], "weight": 2}, "a labelled record has no weight"),
    ],
)
def test_what_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSample, match=message):
        parse(**record)


def test_a_label_is_not_trained_on_in_silence_without_kto() -> None:
    with pytest.raises(BadSample, match=r"^label is true or false.*--loss kto"):
        parse_record({"messages": [ASKED, SAID], "images": ["i.png"], "label": True}, FOLDER)
    assert not is_labelled({"messages": [ASKED, SAID], "label": 1})
