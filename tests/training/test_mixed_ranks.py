"""A rank with text alone and a rank with images alone train together; no reduction hangs."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.verify.curves import DISTRIBUTED, Job, train

STEPS, TIMEOUT = 8, 60.0


def test_text_beside_images_with_overlap(dense: Path, tmp_path: Path) -> None:
    data = write_image_qa(tmp_path, 2 * STEPS, text_only_every=2)
    lines = data.read_text().splitlines()
    # Without shuffling, the two ranks take records in turn.
    text = [line for line in lines if "image" not in line]
    images = [line for line in lines if "image" in line]
    turns = [line for pair in zip(text, images, strict=True) for line in pair]
    data.write_text("\n".join(turns) + "\n")
    assert len(text) == len(images) == STEPS
    job = Job(
        dense, data, Layout(dp=2), steps=STEPS, batch=2, flags=(*DISTRIBUTED, "--no-shuffle")
    )  # fmt: skip
    log = train(job, tmp_path / "run", timeout=TIMEOUT)
    assert len(log) == STEPS
    assert all(entry["patch imbalance"] == 2.0 for entry in log)  # one of two ranks had them all
    assert log[-1]["lm loss"] < log[0]["lm loss"]
    assert all(entry["grad norm vision"] > 0 for entry in log)
