"""A reranker's prompts are Qwen3-VL-Reranker's, for all forms of retrieval records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import parse_judgements
from mcore_qwen3vl.data.records.reading import BadSample, Reading

FOLDER = MediaFolder(Path("/data"), {})


def texts(parts: list[dict[str, Any]]) -> str:
    return "".join(part.get("text", "[image]") for part in parts)


def swift(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


@pytest.mark.parametrize(
    "record",
    [
        {
            "query": "<image>Which?",
            "images": ["q.png"],
            "positive": {"image": "p.png", "text": "A"},
        },
        {
            "messages": swift("user", "<image>Which?"),
            "images": ["q.png"],
            "positive_messages": [swift("assistant", "<image>A")],
            "positive_images": [["p.png"]],
        },
    ],
)
def test_a_document_is_judged_after_its_query(record: dict[str, Any]) -> None:
    found = parse_judgements({**record, "negatives": ["B"]}, FOLDER)
    assert list(found) == ["positive", "negative 0"]
    system, user = found["positive"].messages
    assert system["content"].endswith('the answer can only be "yes" or "no".')
    assert texts(user["content"]) == (
        "<Instruct>: Given a search query, retrieve relevant candidates that answer the query."
        "<Query>:[image]Which?\n<Document>:[image]A"
    )
    media = [one.content for one in found["positive"].media]
    assert media == [Path("/data/q.png"), Path("/data/p.png")]
    assert texts(found["negative 0"].messages[1]["content"]).endswith("\n<Document>:B")
    assert all(one.prompt for one in found.values())


def test_the_instruction_is_the_querys_system_message() -> None:
    record = {"query": "Which?", "positive": "A"}
    (found,) = parse_judgements(record, FOLDER, Reading(system="Find it.")).values()
    assert texts(found.messages[1]["content"]).startswith("<Instruct>: Find it.<Query>:Which?")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"positive": "A"}, "it has no query"),
        ({"query": "Which?"}, "it has no document"),
        ({"query": [*swift("user", "a"), *swift("user", "b")], "positive": "A"}, "2 messages"),
        (
            {"query": "a", "positive": [*swift("system", "Own."), *swift("user", "b")]},
            "positive has a system message",
        ),
    ],
)
def test_what_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSample, match=message):
        parse_judgements(record, FOLDER)
