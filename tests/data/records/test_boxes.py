"""Names and boxes of objects take the place of their tags, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.records.documents import Document
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation, records_of_turns
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import BadSample
from tests.data.conftest import chat, write_png


def parsed(folder: Path, answer: Any, objects: Any) -> Any:
    record = chat(("user", "<image>Where is <ref-object>?<image>"), ("assistant", answer))
    record |= {"images": ["wide.png", "tall.png"], "objects": objects}
    found = parse_record(record, MediaFolder(folder, {}))
    assert isinstance(found, Conversation)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_png(tmp_path / "wide.png", 40, 80)
    write_png(tmp_path / "tall.png", 100, 50)
    return tmp_path


@pytest.mark.parametrize(
    ("objects", "answer"),
    [
        ({"bbox": [[8, 4, 80, 40]]}, "[100, 100, 1000, 1000]"),
        ({"bbox": [[8, 4, 40, 40]], "image_id": [1]}, "[160, 40, 800, 400]"),
        ({"bbox": [[7.3, 39.95]], "bbox_type": "real"}, "[91, 999]"),
        ({"bbox": [[0.25, 0.5, 1, 1]], "bbox_type": "norm1"}, "[250, 500, 1000, 1000]"),
        ({"bbox": [[1, 2, 3, 4]], "bbox_type": "norm1000"}, "[1, 2, 3, 4]"),
    ],
)
def test_boxes_are_parts_of_a_thousand(objects: Any, answer: str, folder: Path) -> None:
    objects = {"ref": ["the cat"], **objects}
    for content in ("<bbox>", [{"type": "text", "text": "<bbox>"}]):
        messages = parsed(folder, content, objects).messages
        assert messages[0]["content"][1] == {"type": "text", "text": "Where is the cat?"}
        shown = messages[1]["content"]
        assert (shown if isinstance(shown, str) else shown[0]["text"]) == answer
    record = {"text": "<image>Here <bbox> is <ref-object>.", "image": "wide.png"}
    if "image_id" not in objects:
        document = parse_record({**record, "objects": objects}, MediaFolder(folder, {}))
        assert isinstance(document, Document)
        assert document.parts[1] == f"Here {answer} is the cat."


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (None, "<ref-object> takes its text from objects.* has none"),
        ({"ref": ["a", "b"], "bbox": [[0, 0]]}, "1 tags <ref-object> and 2 entries in ref"),
        ({"ref": ["a"]}, "1 tags <bbox> and 0 entries in bbox"),
        ({"ref": ["a"], "bbox": [[0, 0, 81, 1]]}, "not inside 80 x 40"),
        ({"ref": ["a"], "bbox": [[0, -1]]}, "coordinate of bbox is -1"),
        ({"ref": ["a"], "bbox": [[0, 0, 1]]}, "x, y, x, y is needed"),
        ({"ref": ["a"], "bbox": [[0, 0]], "image_id": [2]}, "image_id 2 .* there are 2 images"),
        ({"ref": ["a"], "bbox": [[0, 0]], "image_id": [0, 1]}, "2 image_id for 1 bbox"),
        ({"ref": ["a"], "bbox": [[0, 0]], "bbox_type": "pixel"}, "one of real, norm1, norm1000"),
        ({"ref": [1], "bbox": [[0, 0]]}, "ref of objects must be a list of texts"),
    ],
)
def test_objects_that_do_not_fit_are_refused(objects: Any, message: str, folder: Path) -> None:
    with pytest.raises(BadSample, match=message):
        parsed(folder, "<bbox>", objects)


def test_other_keys_of_objects_are_named(folder: Path) -> None:
    (left,) = parsed(folder, "<bbox>", {"ref": ["a"], "bbox": [[0, 0]], "area": 3}).unused
    assert (left.where, left.name) == ("objects", "area")


def records_are_read_as(whole: Any, one_of_each_turn: list[Any]) -> None:
    """Check that the records of a conversation's two turns tell what the conversation tells."""
    folder = MediaFolder(Path(), {})
    told = parse_record(whole, folder).messages
    assert "<" not in str(told)
    assert len(one_of_each_turn) == 2
    for one in one_of_each_turn:
        messages = parse_record(one, folder).messages
        assert messages == told[: len(messages)]


def test_a_record_of_each_turn_has_the_objects_of_its_reasoning_too() -> None:
    record = {
        "messages": [
            {"role": "user", "content": "find <ref-object>"},
            {"role": "assistant", "reasoning_content": "near <bbox>", "content": "<bbox>"},
            {"role": "user", "content": "and <ref-object>"},
            {"role": "assistant", "reasoning_content": "at <bbox>", "content": "<bbox>"},
        ],
        "objects": {
            "ref": ["a", "b"],
            "bbox": [[n, 1, 2, 2] for n in range(4)],
            "bbox_type": "norm1000",
        },
    }
    records_are_read_as(record, records_of_turns(record))


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_a_record_of_each_turn_has_the_objects_of_its_system_text_and_strings_in_lists(
    form: Any,
) -> None:
    record = {
        "system": "You see <ref-object>.",
        "messages": [
            {"role": "user", "content": ["find <ref-object>"]},
            {"role": "assistant", "content": ["a ", {"type": "text", "text": "<ref-object>"}]},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "<ref-object>"},
        ],
        "objects": form({"ref": ["a", "b", "c", "d"], "bbox": None, "bbox_type": "norm1000"}),
    }
    first, second = records_of_turns(record)
    assert first["objects"]["ref"] == ["a", "b", "c"]
    records_are_read_as(record, [first, second])


def test_a_tag_in_the_json_of_a_call_is_no_place_of_an_object_or_an_image(folder: Path) -> None:
    call = {"name": "draw", "arguments": {"text": "<ref-object><image>"}}
    record = {
        "messages": [
            {"role": "user", "content": "<image>look"},
            {"role": "tool_call", "content": json.dumps(call)},
            {"role": "tool_response", "content": "done"},
            {"role": "user", "content": "<image>name it"},
            {"role": "assistant", "content": "<ref-object>"},
        ],
        "images": ["wide.png", "tall.png"],
        "objects": {"ref": ["a"]},
    }
    first, second = records_of_turns(record)
    assert (first["images"], first["objects"]["ref"]) == (["wide.png"], [])
    assert (second["images"], second["objects"]["ref"]) == (["wide.png", "tall.png"], ["a"])
    for one in (first, second):
        parse_record(one, MediaFolder(folder, {}))
