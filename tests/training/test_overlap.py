"""What overlaps communication with computation changes no number and hangs on no batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.verification.curves import DISTRIBUTED, Job, train
from tests.training.log import numbers_of

OVERLAP = "--overlap-moe-expert-parallel-comm"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("ep2xdp2", DISTRIBUTED),
        ("ep2xdp2", ("--keep-activations", "--recompute-granularity", "selective")),
        ("tp2xpp2xvpp2xep2+sp", DISTRIBUTED),
        ("ep2xdp2", ("--lora-rank", "2", "--lora-target", "language")),
    ],
)
def test_an_overlapped_exchange_of_experts_trains_the_same(
    layout: str, flags: tuple[str, ...], moe: Path, data: Path, tmp_path: Path
) -> None:
    job = Job(
        moe, data, Layout.parse(layout), steps=2, batch=4, packing=True, seq_length=256,
        flags=(*flags, "--bf16"),
    )  # fmt: skip
    plain = train(job, tmp_path / "plain", timeout=120)
    overlapped = train(job, tmp_path / "overlapped", OVERLAP, timeout=120)
    assert len(plain) == job.steps
    assert numbers_of(overlapped) == numbers_of(plain)


def test_text_beside_images_with_overlap(dense: Path, tmp_path: Path) -> None:
    """A rank with text alone and a rank with images alone train together; no reduction hangs."""
    steps = 8
    data = write_image_qa(tmp_path, 2 * steps, text_only_every=2)
    lines = data.read_text().splitlines()
    # Without shuffling, the two ranks take records in turn.
    text = [line for line in lines if "image" not in line]
    images = [line for line in lines if "image" in line]
    turns = [line for pair in zip(text, images, strict=True) for line in pair]
    data.write_text("\n".join(turns) + "\n")
    assert len(text) == len(images) == steps
    flags = (*DISTRIBUTED, "--no-shuffle")
    job = Job(dense, data, Layout(dp=2), steps=steps, batch=2, flags=flags)
    log = train(job, tmp_path / "run", timeout=60)
    assert len(log) == steps
    assert all(entry["patch imbalance"] == 2.0 for entry in log)  # one of two ranks had them all
    assert log[-1]["lm loss"] < log[0]["lm loss"]
    assert all(entry["grad norm vision"] > 0 for entry in log)
