"""Retrieval records of all forms are read as prompts, and bad ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig, load_processor
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import parse_record, parse_retrieval
from mcore_qwen3vl.data.records.reading import PLAIN, BadSample, Reading

FOLDER = MediaFolder(Path("/data"), {})
TEXT = {"type": "text", "text": "Which?"}
PARTS = [{"type": "image"}, TEXT]


def parse(reading: Reading = PLAIN, **record: Any) -> dict[str, Conversation]:
    return parse_retrieval(record, FOLDER, reading)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "record",
    [
        {"query": "<image>Which?", "images": ["i.png"]},
        {"query": {"text": "Which?", "image": "i.png"}},
        {"query": user([{"type": "image", "image": "i.png"}, TEXT])},
        {"messages": [user("<image>Which?")], "images": ["i.png"]},
    ],
)
def test_all_forms_of_a_text_are_one(record: dict[str, Any]) -> None:
    (query,) = parse(**record).values()
    assert query.messages == [user(PARTS)]
    assert [media.content for media in query.media] == [Path("/data/i.png")]
    assert query.prompt


def test_every_document_takes_its_own_media() -> None:
    found = parse(
        messages=[user("Which?")],
        positive_messages=[[user("<image>This.")]],
        positive_images=[["p.png"]],
        negative_messages=[[user("That.")], [user("<image>It.")]],
        negative_images=[[], ["n.png"]],
        label=1,
    )
    assert list(found) == ["query", "positive", "negative 0", "negative 1"]
    media = {name: [one.content for one in text.media] for name, text in found.items()}
    assert media["positive"] == [Path("/data/p.png")]
    assert (media["negative 0"], media["negative 1"]) == ([], [Path("/data/n.png")])
    assert (found["query"].target, found["query"].unused) == (1.0, ())


def test_a_list_of_texts_is_one_of_documents() -> None:
    found = parse(query="Which?", positive=["a"], negative=["b", "c"])
    said = {name: text.messages[0]["content"] for name, text in found.items()}
    assert said == {"query": "Which?", "positive": "a", "negative 0": "b", "negative 1": "c"}


def test_a_data_sets_system_prompt_is_the_instruction() -> None:
    own = [{"role": "system", "content": "Own."}, user("It.")]
    found = parse(Reading(system="Find it."), query="Which?", positive=own)
    assert found["query"].messages[0] == {"role": "system", "content": "Find it."}
    assert found["positive"].messages[0]["content"] == "Own."


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"label": 1}, "has query, or messages, and positive"),
        ({"query": 3}, "query: it must be a text"),
        ({"query": " "}, "query is empty"),
        ({"positive": ["a", "b"]}, "positive holds 2 documents; one"),
        ({"query": {"audio": "a.wav"}}, "none of text, image and video"),
        ({"query": "<image>Which?"}, "query: message 1: there are more image placeholders"),
        ({"positive": "a", "positive_messages": []}, "both positive and positive_messages"),
        ({"negatives": "a"}, "negatives is str; a list of documents"),
        ({"positive_messages": [["a"], ["b"]]}, "holds 2 documents; one"),
        ({"negatives": ["a", "b"], "negative_images": [["i.png"]]}, "one list for each of 2"),
    ],
)
def test_what_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSample, match=message):
        parse(**record)


def test_other_training_names_the_flag() -> None:
    record = {
        "messages": [user("Which?"), {"role": "assistant", "content": "It."}],
        "positive": "a",
    }
    with pytest.raises(BadSample, match="--task embedding and --task reranker train on"):
        parse_record(record, FOLDER)


def test_a_check_counts_all_texts_of_a_record(dense: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    records = [{"query": "One?", "positive": "It is.", "negatives": ["No."]}, {"positive": [1]}]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    report = check_data(file, load_processor(dense), DataConfig(256, packing=True))
    assert report.formats == {"retrieval": 1}
    assert len(report.bad) == 1
    assert report.trained_tokens == [0]
    alone = check_data(file, load_processor(dense), DataConfig(report.tokens[0] - 1, packing=True))
    assert "all 3" in alone.overlong[0].reason
