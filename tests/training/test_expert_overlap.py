"""``--overlap-moe-expert-parallel-comm`` changes no number of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verify.curves import DISTRIBUTED, Job, train

STEPS, TIMEOUT = 2, 120.0
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
def test_it_trains_the_same(
    layout: str, flags: tuple[str, ...], moe: Path, data: Path, tmp_path: Path
) -> None:
    job = Job(
        moe, data, Layout.parse(layout), steps=STEPS, batch=4, packing=True, seq_length=256,
        flags=(*flags, "--bf16"),
    )  # fmt: skip
    plain = train(job, tmp_path / "plain", timeout=TIMEOUT)
    overlapped = train(job, tmp_path / "overlapped", OVERLAP, timeout=TIMEOUT)
    assert len(plain) == STEPS
    for name in ("lm loss", "grad norm"):
        assert [one[name] for one in overlapped] == [one[name] for one in plain]
