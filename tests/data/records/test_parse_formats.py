"""Every format gives the tokens of HF's chat template, and malformed records are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.records.parse import FORMATS, format_of
from mcore_qwen3vl.data.records.reading import BadSample
from tests.data.conftest import WriteJsonl, chat
from tests.data.encoding.test_planning import planned, trained_text
from tests.data.records.format_examples import DOCUMENTS, EXAMPLES, MALFORMED, TEMPLATE

END = "<|im_end|>"


@pytest.fixture
def with_tools(processor: Any) -> Any:
    """Return a processor whose template knows tools."""
    processor.chat_template = TEMPLATE
    return processor


@pytest.mark.parametrize("name", EXAMPLES)
def test_tokens_are_hf_s_and_the_loss_falls_on_answers(
    name: str, with_tools: Any, media: Path, tmp_path: Path
) -> None:
    (tmp_path / "media").symlink_to(media)
    example = EXAMPLES[name]
    chat = [
        {**turn, "content": [_found(part, tmp_path) for part in turn["content"]]}
        if isinstance(turn["content"], list)
        else turn
        for turn in example.chat
    ]
    expected = with_tools.apply_chat_template(
        chat, tools=example.tools, tokenize=True, return_dict=True
    )
    plan = planned(with_tools, example.record, tmp_path)[0]
    assert plan.input_ids.tolist() == expected["input_ids"][0]
    assert trained_text(with_tools, plan) == [answer + END for answer in example.trained]
    assert format_of(example.record).name == example.format


def _found(part: dict[str, str], root: Path) -> dict[str, str]:
    return {**part, "path": str(root / part["path"])} if "path" in part else part


def test_every_format_has_ten_malformed_variants() -> None:
    assert set(MALFORMED) == {one.name for one in FORMATS}
    assert min(map(len, MALFORMED.values())) >= 10


@pytest.mark.parametrize("form", MALFORMED)
def test_malformed_variants_are_counted_named_and_left_out(
    form: str, with_tools: Any, write_jsonl: WriteJsonl
) -> None:
    good = {
        **{name: e.record for name, e in EXAMPLES.items() if e.format == form},
        **{name: record for name, (f, record) in DOCUMENTS.items() if f == form},
    }
    bad = MALFORMED[form]
    path = write_jsonl([*good.values(), *(record for record, _ in bad)])
    report = check_data(path, with_tools, DataConfig(4096, packing=True))
    assert report.formats[form] >= len(good)
    assert len(report.tokens) == len(good)
    assert [flaw.sample for flaw in report.bad] == [
        f"{path}:{line}" for line in range(len(good) + 1, len(good) + len(bad) + 1)
    ]
    for flaw, (record, said) in zip(report.bad, bad, strict=True):
        assert re.search(re.escape(said), flaw.reason), (record, flaw.reason)
        assert ": " not in flaw.reason.split(" ")[0], "an exception of Python's, not a message"


def test_a_record_of_no_format_says_which_keys_are_looked_for() -> None:
    with pytest.raises(BadSample, match="has the keys prompt, answer; none of messages, conv"):
        format_of({"prompt": "q", "answer": "a"})
    with pytest.raises(BadSample, match="none of conversations"):
        format_of(chat(("user", "q")), "conversations")
    assert format_of({**chat(("user", "q")), "text": "both"}).name == "messages"
