"""A teacher's file is read record by record, and refused if it is not of these data and tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.indexes import ensure_index
from mcore_qwen3vl.data.processor import vocabulary_fingerprint
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.data.scores import (
    facts_file_of,
    file_digest,
    token_digest,
    trained_digest,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.teacher_file import (
    Teacher,
    TeacherFile,
    Top,
    encode_top,
    teacher_file_of,
    write_teacher,
)

K, RECORDS, SIZE = 3, 150, 11
TOKENIZER: Any = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})


def plan_of(index: int) -> Plan:
    """Return a record's tokens, of which the first two are not trained."""
    ids = np.arange(index % 4 + 3, dtype=np.int64) + index
    weights = np.ones(len(ids), np.float32)
    weights[[0, 1]] = 0
    return Plan(ids, weights, [])


def top_of(index: int) -> Top:
    generator = torch.Generator().manual_seed(index)
    count = len(plan_of(index).input_ids) - 2
    ids = torch.rand(count, SIZE, generator=generator).argsort(-1)[:, :K].int()
    return Top(ids, torch.rand(count, K + 1, generator=generator).log())


def write(folder: Path) -> Path:
    """Write data and a teacher's file, whose record 70 has an error."""
    data = folder / "data.jsonl"
    data.write_text("".join(f'{{"text": "{i}"}}\n' for i in range(RECORDS)))
    lines = []
    for i in range(RECORDS):
        top = top_of(i)
        plan = plan_of(i)
        entry = {"digest": token_digest(plan.input_ids), "tokens": len(top.ids)}
        entry |= {"trained": trained_digest(plan.loss_weights)} if i % 2 == 0 else {}
        entry |= encode_top(top.ids.numpy(), top.log_probs.numpy())
        lines.append({"line": i + 1, **({"error": "it is broken"} if i == 70 else entry)})
    partial = folder / "lines"
    partial.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_teacher(partial, teacher_file_of(data))
    settings = {
        "data": file_digest(data),
        "temperature": 2.0,
        "top_k": K,
        "checkpoint": {"path": "/big"},
        "vocabulary": vocabulary_fingerprint(TOKENIZER, SIZE),
    }
    facts_file_of(teacher_file_of(data)).write_text(json.dumps({"settings": settings}))
    return data


def opened(data: Path, **changes: Any) -> Teacher:
    options = {"tokenizer": TOKENIZER, "vocab_size": SIZE, "temperature": 2.0} | changes
    file = TeacherFile(options["temperature"])
    (teacher,) = file.open([data], options["tokenizer"], options["vocab_size"])
    return teacher


def test_each_record_has_its_own_tokens(tmp_path: Path) -> None:
    teacher = opened(write(tmp_path))
    for index in (0, 63, 64, 149):
        found = teacher.look_up(index, [plan_of(index)])
        assert torch.equal(found.ids, top_of(index).ids)
        assert torch.equal(found.log_probs, top_of(index).log_probs)
    with pytest.raises(BadSample, match=r"no scores in .*data\.topk\.arrow: it is broken"):
        teacher.look_up(70, [plan_of(70)])


def test_the_last_row_is_for_positions_that_are_not_trained() -> None:
    parts = [top_of(0), top_of(5)]
    records = [SimpleNamespace(beside=part) for part in parts]
    whole = Top.of_records(records, lambda *_: None, None)
    assert torch.equal(whole.ids[:-1], torch.cat([one.ids for one in parts]))
    assert torch.equal(whole.log_probs[:-1], torch.cat([one.log_probs for one in parts]))
    assert whole.log_probs[-1].isfinite().all()


def test_other_tokens_or_other_trained_ones_stop_the_run(tmp_path: Path) -> None:
    data = write(tmp_path)
    teacher, plan = opened(data), plan_of(6)
    ensure_index(data)
    one_more, others = plan.loss_weights.copy(), plan.loss_weights.copy()
    one_more[1] = 1
    others[[1, 2]] = 1, 0  # as many
    teacher.look_up(6, [plan])
    for other in (
        replace(plan, input_ids=plan.input_ids + 1),
        replace(plan, loss_weights=one_more),
        replace(plan, loss_weights=others),
    ):
        with pytest.raises(BadInput, match=r"data\.jsonl:7 no longer has the tokens"):
            teacher.look_up(6, [other])


def cut(data: Path) -> None:
    file = teacher_file_of(data)
    file.write_bytes(file.read_bytes()[: math.ceil(file.stat().st_size * 0.9)])


@pytest.mark.parametrize(
    ("harm", "options", "message"),
    [
        (cut, {}, r"data\.topk\.arrow cannot be read and may be cut off .*--top-k 64"),
        (lambda data: teacher_file_of(data).unlink(), {}, r"exist\. .* --temperature 2`\.$"),
        (None, {"temperature": 1.0}, "made with temperature 2, and 1 is needed"),
        (None, {"vocab_size": SIZE + 1}, "was made by /big, whose vocabulary is not"),
        (
            None,
            {"tokenizer": SimpleNamespace(get_vocab=lambda: {"a": 1, "b": 0})},
            "whose vocabulary is not",
        ),
    ],
)
def test_what_is_refused(
    harm: Callable[[Path], Any] | None, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = write(tmp_path)
    if harm is not None:
        harm(data)
    with pytest.raises(BadInput, match=message):
        opened(data, **options)
