"""A document is text with images between, or after its images."""

from __future__ import annotations

from mcore_qwen3vl.data.records.documents import Document
from tests.data.records.test_parse import parse


def test_documents() -> None:
    assert parse({"text": "abc", "weight": 0.5}) == Document(["abc"], 0.5)
    document = parse({"texts": [None, "b"], "images": ["i.png", None]})
    assert [part if isinstance(part, str) else part.kind for part in document.parts] == [
        "image",
        "b",
    ]
