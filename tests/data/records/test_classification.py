"""A classifier's records of all forms are read with the right target, and bad ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import is_classification, parse_classification
from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.unused import Unused

FOLDER = MediaFolder(Path("/data"), {})
ASKED = {"role": "user", "content": "Which?"}
SAID = {"role": "assistant", "content": "This."}
SINGLE = Labels(("ant", "bee", "cow"), "single_label_classification")
MULTI = Labels(SINGLE.names, "multi_label_classification")


def parse(labels: Labels | None = SINGLE, system: str | None = None, **record: Any) -> Conversation:
    return parse_classification(record, FOLDER, Reading(system=system), labels)


@pytest.mark.parametrize("label", [1, "bee", [1], ["bee"], True])
def test_a_label_is_a_number_or_a_name(label: Any) -> None:
    assert parse(messages=[ASKED], label=label).target == (0, 1, 0)


def test_several_labels_may_be_right() -> None:
    assert parse(MULTI, messages=[ASKED], label=["cow", 0]).target == (1, 0, 1)
    assert parse(MULTI, messages=[ASKED], label=[]).target == (0, 0, 0)


def test_the_generation_prompt_follows_messages_without_an_answer() -> None:
    found = parse(messages=[ASKED, SAID], label=0)
    assert (found.prompt, found.format, found.unused) == (False, "classification", ())
    assert parse(messages=[ASKED], label=0).prompt
    found = parse(system="Be brief.", image="i.png", text="Which?", label=0, source="web")
    assert found.prompt
    assert [message["role"] for message in found.messages] == ["system", "user"]
    assert [media.name for media in found.media] == ["i.png"]
    assert found.unused == (Unused("a record", "source"),)


def test_scoring_needs_no_label() -> None:
    assert parse(None, messages=[ASKED]).target is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [ASKED]}, "it has 0 labels, and --task classify trains on one"),
        ({"messages": [ASKED], "label": [0, 1]}, "it has 2 labels.*--problem-type multi_label"),
        ({"messages": [ASKED], "label": 3}, r"label is \[3\]; the 3 labels are ant, bee, cow"),
        ({"messages": [ASKED], "label": "dog"}, "the 3 labels are ant, bee, cow"),
        ({"messages": [ASKED], "label": 0.5}, "label is 0.5; a number from 0 or a name"),
        ({"messages": [ASKED], "label": -1}, "label is -1; a number from 0 or a name"),
        ({"label": 0}, "none of text, image and video"),
    ],
)
def test_a_bad_record_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSample, match=message):
        parse(**record)


def test_only_a_record_without_an_answer_is_a_classifiers_by_its_keys() -> None:
    assert is_classification({"messages": [ASKED], "label": "bee"})
    assert is_classification({"image": "i.png", "label": 2})
    assert not is_classification({"image": "i.png", "text": "A bee.", "label": 2})
    assert not is_classification({"image": "i.png", "conversations": [], "label": 2})
    assert not is_classification({"label": 2})
    assert not is_classification({"messages": [ASKED, SAID], "label": "bee"})
    assert not is_classification({"messages": [ASKED], "label": True})
    assert not is_classification({"messages": [ASKED]})
