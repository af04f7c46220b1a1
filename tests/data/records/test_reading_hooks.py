"""A hook makes records, and a data set says which turns are trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import find_hook, parse_record
from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.errors import BadInput
from tests.data.conftest import WriteJsonl, chat, question
from tests.data.encoding.test_planning import planned, trained_text

END = "<|im_end|>"


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
