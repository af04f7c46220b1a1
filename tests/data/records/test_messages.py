"""Messages and turns become those that chat templates read."""

from __future__ import annotations

from typing import Any

from mcore_qwen3vl.data.records.messages import Conversation
from tests.data.conftest import chat
from tests.data.records.test_parse import parse


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
