"""Messages, parts and labels as JSON text, where plain text may stand too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation, records_of_turns
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import PLAIN, BadSample
from mcore_qwen3vl.data.records.tasks import (
    is_classification,
    labels_in,
    parse_classification,
    parse_labelled,
    parse_pair,
    parse_retrieval,
)
from mcore_qwen3vl.losses.registry import detected_form
from tests.data.conftest import WriteJsonl

FOLDER = MediaFolder(Path("/data"), {})
ASKED = {"role": "user", "content": "Which is it?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("The first.", "None."))
COLUMNS = {"role": ["user", "assistant"], "content": ["Which is it?", "The first."]}
PARTS = [{"type": "text", "text": "Which "}, {"type": "text", "text": "is it?"}]
SEEN = [{"type": "image", "image": "cat.png", "max_pixels": 4096}, {"type": "text", "text": "So?"}]


def conversation(record: Any) -> Conversation:
    read = parse_record(record, FOLDER)
    assert isinstance(read, Conversation)
    return read


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"messages": [ASKED], "chosen": GOOD, "rejected": [BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"chosen": COLUMNS, "rejected": [ASKED, BAD]},
    ],
)
def test_pairs(record: dict[str, Any]) -> None:
    as_text = {key: json.dumps(value, indent=1) for key, value in record.items()}
    pair = parse_pair(as_text, FOLDER)
    assert pair == parse_pair(record, FOLDER)
    assert pair["chosen"].messages == [ASKED, GOOD]
    assert pair["chosen"].weights == pair["rejected"].weights == [0, 1]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASKED], "completion": [GOOD], "label": True},
        {"prompt": ASKED, "completion": GOOD, "label": True},
        {"messages": COLUMNS, "label": True},
    ],
)
def test_labelled_records(record: dict[str, Any]) -> None:
    nested = {key: value for key, value in record.items() if key != "label"}
    as_text = record | {key: json.dumps(value) for key, value in nested.items()}
    assert parse_labelled(as_text, FOLDER) == parse_labelled(record, FOLDER)
    assert parse_labelled(as_text, FOLDER).messages == [ASKED, GOOD]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASKED], "positive": [GOOD]},
        {"messages": COLUMNS, "positive": COLUMNS},
        {"query": {"text": "cat", "image": "cat.png"}, "positive": {"text": "A cat."}},
        {"query": [ASKED], "positive": "A cat.", "negative": ["A dog.", "A cow."]},
        {"query": "cat", "positive_messages": [[ASKED]], "negative_messages": [[GOOD], [BAD]]},
        {"query": "cat", "positive": ["A cat."], "negatives": ["A dog.", {"text": "A cow."}]},
        {"query": "cat", "positive": "<image>A cat.", "positive_images": [["cat.png"]]},
    ],
)
def test_retrieval_records(record: dict[str, Any]) -> None:
    as_text = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in record.items()
    }
    assert parse_retrieval(as_text, FOLDER) == parse_retrieval(record, FOLDER)
    single = {"query": "cat", "negatives": [json.dumps([ASKED]), json.dumps({"text": "A cow."})]}
    assert [
        prompt.messages[-1]["content"] for prompt in parse_retrieval(single, FOLDER).values()
    ] == ["cat", "Which is it?", [{"type": "text", "text": "A cow."}]]


def test_labels_and_messages_of_a_classifier() -> None:
    assert labels_in({"label": "[0, 2]"}) == [0, 2]
    assert labels_in({"label": '["ant", "bee"]'}) == ["ant", "bee"]
    assert labels_in({"label": "[x]"}) == ["[x]"]
    record = {"messages": json.dumps([ASKED]), "label": 1}
    assert is_classification(record)
    assert not is_classification({**record, "messages": json.dumps(COLUMNS)})
    assert parse_classification(record, FOLDER, reading=PLAIN, labels=None).messages == [ASKED]


@pytest.mark.parametrize("parts", [PARTS, SEEN])
def test_parts_of_a_content(parts: Any) -> None:
    as_text = {"messages": [{**ASKED, "content": json.dumps(parts)}, GOOD]}
    read = conversation(as_text)
    assert read == conversation({"messages": [{**ASKED, "content": parts}, GOOD]})
    assert len(read.media) == (parts is SEEN)
    (turn,) = records_of_turns({**as_text, "images": ["cat.png"]})
    assert turn["messages"][0]["content"] == parts
    pair = parse_pair({**as_text, "messages": as_text["messages"][:1], **ANSWERS}, FOLDER)
    assert pair["chosen"].messages[:1] == read.messages[:1]


ANSWERS = {"chosen": "The first.", "rejected": "None."}


@pytest.mark.parametrize(
    "text",
    [
        "[1] is it.",
        '{"role": "admin", "content": "none"}',
        '{"role": "user", "name": "Ada"}',
        '[{"role": "user"}, 1]',
        '[{"type": "text", "bbox": [1, 2, 3, 4], "text": "A title"}]',
        '[{"type": "image", "bbox": [1, 2, 3, 4]}',
        '{"type": "text", "text": "x"}',
        '["a", "b"]',
        "[]",
        '{"role": ["user"]}',
    ],
)
def test_other_json_is_text(text: str) -> None:
    """An answer may be JSON, also of objects that have the types of parts."""
    pair = parse_pair({"prompt": "Q", "chosen": text, "rejected": "none"}, FOLDER)
    assert pair["chosen"].messages[-1] == {"role": "assistant", "content": text}
    read = conversation({"messages": [ASKED, {"role": "assistant", "content": text}]})
    assert read.messages[-1]["content"] == text


def test_what_was_meant_as_a_list_and_is_no_json() -> None:
    for broken in (str([ASKED, GOOD]), json.dumps([ASKED, GOOD])[:-1]):
        for key in ("prompt", "chosen", "rejected"):
            with pytest.raises(BadSample, match=f"{key} is text that begins as a list of messages"):
                parse_pair({"prompt": "Q", **ANSWERS, key: broken}, FOLDER)
        with pytest.raises(BadSample, match="completion is text that begins as a list of messages"):
            parse_labelled({"prompt": "Q", "completion": broken, "label": True}, FOLDER)
        with pytest.raises(BadSample, match="query: it is text that begins as a list of messages"):
            parse_retrieval({"query": broken, "positive": "A cat."}, FOLDER)
    with pytest.raises(BadSample, match="content is text that begins as a list of parts does"):
        conversation({"messages": [{**ASKED, "content": str(PARTS)}, GOOD]})


def test_the_report_counts_the_tokens_of_messages(
    processor: Any, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    record = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}
    as_text = {key: json.dumps(value) for key, value in record.items()}
    report = check_data(
        write_jsonl([record, as_text]),
        processor,
        DataConfig(seq_length=512, records=detected_form()),
    )
    assert report.bad == []
    assert report.tokens[0] == report.tokens[1]
