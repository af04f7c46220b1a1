"""Data sets, and the record of a command over them, as a run makes it."""

import json
from functools import cache
from pathlib import Path

import pytest

from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.contract.record import RunRecord
from mcore_qwen3vl.training.contract.resuming import record_of

pytest.register_assert_rewrite("tests.training.contract.cases")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of data sets and mixtures."""
    folder = tmp_path_factory.mktemp("sets")
    asked = [f"Say {number}." for number in (3, 1, 2)]
    sets = {
        "a": asked,
        "b": [text.replace("Say", "Add") for text in asked],
        "sorted": sorted(asked),
    }
    sets["c"] = [*asked, "Say 4."]
    for name, questions in sets.items():
        turns = [
            [{"role": "user", "content": q}, {"role": "assistant", "content": "No"}]
            for q in questions
        ]
        lines = [json.dumps({"messages": messages}) for messages in turns]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    for name, key, values in (
        ("half", "weight", (1, 1)), ("most", "weight", (9, 1)), ("once", "epochs", (1, 1)),
        ("twice", "epochs", (1, 2)), ("one", "max_samples", (1, 1)), ("two", "max_samples", (1, 2)),
    ):  # fmt: skip
        pairs = [{"path": p, key: v} for p, v in zip(("a.jsonl", "c.jsonl"), values, strict=True)]
        (folder / f"{name}.yaml").write_text(json.dumps({"datasets": pairs}))
    return folder


@cache
def record(model: Path, data: Path, flags: str) -> RunRecord:
    """Return the record of a command, as a run makes it before it loads a checkpoint."""
    words = [str(data / w) if w.endswith((".jsonl", ".yaml")) else w for w in flags.split()]
    length = {"--num-epochs", "--train-iters", "--train-samples"} & {*words}
    base = [] if length else ["--train-iters", "3"]
    base += [] if "--data-path" in words else ["--data-path", str(data / "a.jsonl")]
    ranks = 2 if {"--tensor-model-parallel-size", "--context-parallel-size"} & {*words} else 1
    argv = ["--cpu", "--hf-model", str(model), "--seq-length", "128", "--lr", "1", *base, *words]
    parsed = validate(argv, ranks)
    return record_of(parsed.args, parsed.settings)
