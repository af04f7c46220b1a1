"""Sound records are read, and the faults of others are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import join_parts, parse_record
from mcore_qwen3vl.data.records.reading import BadSample
from tests.data.conftest import chat


def parse(record: Any, root: Path = Path("/data")) -> Any:
    return parse_record(record, MediaFolder(root, {}))


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
