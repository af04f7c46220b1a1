"""Sound records are read, and the faults of others are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.records.media import (
    MediaFolder,
)
from mcore_qwen3vl.data.records.parse import Conversation, Document, join_parts, parse_record
from mcore_qwen3vl.data.records.reading import BadSample
from tests.data.conftest import chat, write_png


def parse(record: Any, root: Path = Path("/data")) -> Any:
    return parse_record(record, MediaFolder(root, {}))


def test_tags_and_parts_give_the_same_conversation() -> None:
    tags = {
        **chat(("user", "a<image>b<video>"), ("assistant", "c")),
        "images": ["i.png"],
        "videos": ["v.mp4"],
    }

    def parts(image: dict[str, str], video: dict[str, str]) -> dict[str, Any]:
        content = [
            {"type": "text", "text": "a"},
            {"type": "image", **image},
            {"type": "text", "text": "b"},
            {"type": "video", **video},
        ]
        return chat(("user", content), ("assistant", "c"))

    inline = parts({"image": "i.png"}, {"video": "v.mp4"})
    listed = {**parts({}, {}), "images": ["i.png"], "videos": ["v.mp4"]}
    for record in (tags, inline, listed):
        parsed = parse(record)
        assert isinstance(parsed, Conversation)
        assert parsed.messages[0]["content"] == [
            {"type": "text", "text": "a"},
            {"type": "image"},
            {"type": "text", "text": "b"},
            {"type": "video"},
        ]
        assert [str(m.content) for m in parsed.media] == ["/data/i.png", "/data/v.mp4"]


def test_text_stays_a_string_and_tools_are_kept() -> None:
    parsed = parse({**chat(("user", "q"), ("assistant", "a")), "tools": [{"name": "t"}]})
    assert parsed.messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    assert parsed.tools == [{"name": "t"}]
    assert parsed.weights == [0, 1]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([], "must be a JSON object"),
        ({}, r"none of messages, conversations, texts.* nor chosen, rejected .* or positive"),
        (chat(("user", "q"), ("assistant", [])), "message 2, an assistant turn, is empty"),
        ({**chat(("user", "<image>"), ("assistant", "a")), "images": [7]}, "reference is 7"),
        (
            {
                **chat(("user", "<image>"), ("assistant", "a")),
                "images": ["data:image/png;base64,?"],
            },
            "not valid base64",
        ),
        ({**chat(("user", "q"), ("assistant", "a")), "weight": float("nan")}, "weight is nan"),
        ({**chat(("user", "q"), ("assistant", "a")), "weight": 0}, "nothing would be trained"),
    ],
)
def test_malformed_records_say_what_is_wrong(record: Any, said: str) -> None:
    """`test_formats` has others, of every format."""
    with pytest.raises(BadSample, match=said):
        parse(record)


def test_documents() -> None:
    assert parse({"text": "abc", "weight": 0.5}) == Document(["abc"], 0.5)
    document = parse({"texts": [None, "b"], "images": ["i.png", None]})
    assert [part if isinstance(part, str) else part.kind for part in document.parts] == [
        "image",
        "b",
    ]


def test_webdataset_parts() -> None:
    folder = MediaFolder(Path("/tars"), {"jpg": b"J", "txt": b"caption \xc3\xa9"})
    document = parse_record(join_parts(folder.parts, None), folder)
    assert document.parts[1] == "caption é"
    assert document.media[0].content == b"J"
    folder = MediaFolder(Path("/tars"), {"one.png": b"1", "two.png": b"2"})
    record = {**chat(("user", "<image><image>"), ("assistant", "a"))}
    record["images"] = ["two.png", "one.png"]
    parsed = parse_record(join_parts(folder.parts, record), folder)
    assert [m.content for m in parsed.media] == [b"2", b"1"]


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
