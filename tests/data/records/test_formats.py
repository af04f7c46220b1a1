"""Every format gives the tokens of HF's chat template, and malformed records are named."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import FORMATS, find_hook, format_of, parse_record
from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.errors import BadInput
from tests.data.conftest import WriteJsonl, chat, question
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


def vqa(record: Any) -> Any:
    """Serve as a hook that makes a chat of a record, or raises."""
    if record.get("drop"):
        return None
    return chat(("user", record["q"]), ("assistant", str(10 / record["n"])))


def test_a_hook_makes_records_and_its_errors_are_the_sample_s(
    processor: Any, write_jsonl: WriteJsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl([{"q": "?", "n": 4}, {"q": "?", "n": 0}, {"drop": 1}, question(0)])
    hook = f"{__name__}:vqa"
    sys.modules.setdefault(__name__, sys.modules[vqa.__module__])
    config = DataConfig(4096, packing=True)
    report = check_data(path, processor, config, defaults=Reading(preprocess=hook))
    assert len(report.tokens) == 1
    assert [flaw.reason for flaw in report.bad] == [
        "ZeroDivisionError: division by zero",
        f"{hook} returned None for it.",
        "KeyError: 'q'",
    ]
    plan = planned(processor, {"q": "?", "n": 4}, path.parent, Reading(preprocess=hook))[0]
    assert trained_text(processor, plan) == ["2.5" + END]
    with pytest.raises(BadInput, match=r"preprocess nowhere:f cannot be imported: .*No module"):
        check_data(path, processor, config, defaults=Reading(preprocess="nowhere:f"))
    with pytest.raises(BadInput, match="unheard_of: no installed package has registered"):
        find_hook("unheard_of")


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [("all", ["one", "two yes", "three"]), ("last", ["three"]), (r"\byes$", ["two yes"])],
)
def test_the_turns_that_are_trained_and_the_system_prompt(
    train_on: str, trained: list[str], processor: Any, tmp_path: Path
) -> None:
    talk = chat(
        ("user", "a"), ("assistant", "one"),
        ("user", "b"), ("assistant", "two yes"),
        ("user", "c"), ("assistant", "three"),
    )  # fmt: skip
    reading = Reading(system="Think.", train_on=train_on)
    plan = planned(processor, talk, tmp_path, reading)[0]
    assert trained_text(processor, plan) == [answer + END for answer in trained]
    text = processor.tokenizer.decode(plan.input_ids.tolist())
    assert text.startswith("<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\na")
    own = {"messages": [{"role": "system", "content": "Mine."}, *talk["messages"]]}
    plan, _ = planned(processor, own, tmp_path, reading)
    text = processor.tokenizer.decode(plan.input_ids.tolist())
    assert "Mine." in text
    assert "Think." not in text


def test_no_turn_chosen_and_a_broken_expression(tmp_path: Path) -> None:
    with pytest.raises(BadSample, match="train_on 'x' selects no assistant turn"):
        parse_record(question(0, image=False), MediaFolder(tmp_path, {}), Reading(train_on="x"))
    with pytest.raises(BadInput, match=r"train_on is '\(': neither all nor last"):
        Reading(train_on="(")
