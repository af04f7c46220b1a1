"""Padding, packing and uneven micro-batches change nothing, under any layout."""

from __future__ import annotations

import pytest

from mcore_qwen3vl.layout import Layout
from tests.model.engine import Case, References, check
from tests.model.samples import Sample, packed, padded, sample

IMAGE = [("image", 1, 4, 6), ("image", 1, 2, 4)]
VIDEO = [("video", 2, 4, 4)]
BOTH = [("image", 1, 2, 6), ("video", 3, 2, 4)]


def mixed(reference, *lengths: int) -> list[Sample]:  # type: ignore[no-untyped-def]
    media = [IMAGE, [], VIDEO, BOTH]
    return [
        sample(reference.architecture, n, media[i % 4], seed=20 + i) for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("layout", ["single", "tp2+sp", "cp2", "pp2xvpp2", "tp2xcp2+sp"])
def test_padded(reference: References, layout: str, left: bool) -> None:
    hf = reference()
    samples = mixed(hf, 25, 19, 32, 23)
    batches = [[padded(hf.architecture, samples[i : i + 2], 32, left) for i in (0, 2)]]
    check(Case(Layout.parse(layout), hf, batches, hf.expect(samples)))


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("layout", ["single", "tp2+sp", "cp2", "cp4", "pp2xvpp2", "tp2xcp2+sp"])
def test_packed(reference: References, layout: str, moe: bool) -> None:
    """Samples of mixed kinds, each padded as CP asks, then padding at the tail."""
    hf = reference(moe=moe)
    samples = mixed(hf, 25, 13, 24, 29)
    batches = [
        [
            packed(hf.architecture, samples[:3], multiple=8, tail=16),
            packed(hf.architecture, samples[3:], multiple=8, tail=56),
        ]
    ]
    check(Case(Layout.parse(layout), hf, batches, hf.expect(samples)))


@pytest.mark.parametrize("layout", ["pp2", "pp2xvpp2", "tp2xpp2+sp", "pp4"])
def test_micro_batches_of_different_length(reference: References, layout: str) -> None:
    hf = reference()
    samples = mixed(hf, 24, 24, 40, 40, 32, 32, 28, 28)
    batches = [
        [
            padded(hf.architecture, samples[i : i + 2], samples[i].input_ids.shape[1])
            for i in (0, 2, 4, 6)
        ]
    ]
    check(
        Case(
            Layout.parse(layout),
            hf,
            batches,
            hf.expect(samples),
            overrides={"variable_seq_lengths": True},
        )
    )


@pytest.mark.parametrize("layout", ["dp2", "tp2xdp2+sp", "pp2xdp2"])
def test_a_rank_without_images(reference: References, layout: str) -> None:
    """Its vision gradients still arrive, bucket by bucket, and are zero."""
    hf = reference()
    a = hf.architecture
    with_images = [sample(a, 32, IMAGE, seed=1), sample(a, 32, VIDEO, seed=2)]
    text = [sample(a, 32, seed=3), sample(a, 32, seed=4)]
    batches = [[padded(a, [s], 32) for s in rank] for rank in (with_images, text)]
    check(
        Case(
            Layout.parse(layout),
            hf,
            batches,
            hf.expect(with_images + text),
            ddp={"overlap_grad_reduce": True, "bucket_size": 4000},
        )
    )
