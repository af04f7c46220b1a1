"""A hook makes records, and its errors are those of the samples."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.records.hooks import find_hook
from mcore_qwen3vl.data.records.reading import Reading
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
