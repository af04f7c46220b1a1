"""Weights & Biases receives what TensorBoard does and our own numbers: `make test-trackers`.

The run is offline, so W&B writes a file to upload later, and the test reads this file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verification.curves import Job, train

pytest.importorskip("wandb", reason="`make test-trackers` installs it")

BLOCK, HEADER = 32768, 7
"""Sizes of LevelDB's log format, which a ``.wandb`` file has after seven bytes of its own."""


def records(file: Path) -> Iterator[Any]:
    """Yield the protocol messages of a ``.wandb`` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, message = file.read_bytes(), HEADER, b""
    while place < len(content):
        if BLOCK - place % BLOCK < HEADER:  # the rest of a block is padding
            place += BLOCK - place % BLOCK
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        message += content[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(message)
            message = b""


def history(file: Path) -> dict[int, dict[str, float]]:
    """Return the logged numbers by step."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for record in records(file):
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            found[record.history.step.num][name] = json.loads(item.value_json)
    return found


@pytest.mark.slow
def test_an_offline_run_has_the_numbers_of_the_log(
    dense: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb = ("--wandb-project", "vision", "--wandb-exp-name", "first")
    places = ("--tensorboard-dir", str(tmp_path / "tb"), "--wandb-save-dir", str(tmp_path))
    valid = ("--valid-data-path", "0.5", str(data), "0.5", str(data.with_name("copy.jsonl")))
    data.with_name("copy.jsonl").write_text(data.read_text())
    job = Job(dense, data, Layout.parse("dp2"), steps=3, seq_length=256, packing=True)
    log = train(
        job, tmp_path, *wandb, *places, *valid, "--eval-iters", "1", "--eval-interval", "3",
        "--data-path", *valid[1:],
    )  # fmt: skip
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    seen = history(file)
    for entry in log:
        step = seen[entry["iteration"]]
        assert step["lm loss"] == pytest.approx(entry["lm loss"], rel=1e-6)
        assert step["grad-norm"] == pytest.approx(entry["grad norm"], rel=1e-6)
        assert step["learning-rate"] == entry["learning rate"]
        ours = {n: x for n, x in entry.items() if f"qwen3-vl/{n}" in step}
        assert {"tokens/s", "images/s", f"lm loss {data}"} <= ours.keys()
        assert ours == {n: step[f"qwen3-vl/{n}"] for n in ours}
    assert f"lm loss {data} validation" in seen[3]
    print("observed:", sorted(set().union(*seen.values())))
    (run,) = (record.run for record in records(file) if record.HasField("run"))
    assert (run.project, run.display_name) == ("vision", "first")
