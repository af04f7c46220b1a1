"""Logits, loss and every gradient of a layout equal Hugging Face's."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_qwen3vl.layout import Layout
from tests.model.engine import Case, References, check
from tests.model.reference import Reference
from tests.model.samples import padded, sample


def image_case(reference: Reference, layout: str, **kwargs: Any) -> Case:
    """Two micro-batches of two samples a DP rank: images, a video, and text of one length."""
    a, parsed = reference.architecture, Layout.parse(layout)
    media = [
        [("image", 1, 4, 6), ("image", 1, 6, 2)],
        [("video", 2, 4, 4)],
        [],
        [("image", 1, 4, 4), ("video", 2, 2, 4)],
    ]
    samples, batches = [], []
    for rank in range(parsed.dp):
        mine = [sample(a, 32, m, seed=10 * rank + i) for i, m in enumerate(media)]
        samples += mine
        batches.append([padded(a, mine[:2], 32), padded(a, mine[2:], 32)])
    return Case(parsed, reference, batches, reference.expect(samples), **kwargs)


DENSE = ["single", "tp2", "tp2+sp", "tp4+sp", "pp2", "pp4", "pp2xvpp2", "pp2+first1", "pp2+last1"]
DENSE += ["cp2", "cp4", "dp2", "tp2xpp2+sp", "tp2xcp2+sp", "pp2xcp2"]
MOE = ["single", "tp2+sp", "pp2", "ep2xdp2", "cp2xep2", "tp2xep2+sp", "tp2xetp2+sp"]


@pytest.mark.parametrize("layout", DENSE)
def test_dense(reference: References, layout: str) -> None:
    check(image_case(reference(), layout))


@pytest.mark.parametrize("layout", MOE)
def test_moe(reference: References, layout: str) -> None:
    check(image_case(reference(moe=True), layout))


@pytest.mark.parametrize("layout", ["single", "pp2", "pp2xvpp2", "tp2xpp2xep2+sp"])
def test_dense_and_moe_layers_mixed(reference: References, layout: str) -> None:
    check(image_case(reference(moe=True, text={"mlp_only_layers": [0, 3]}), layout))


def test_eight_ranks(reference: References) -> None:
    check(image_case(reference(moe=True), "tp2xpp2xvpp2xep2xcp2+sp"))
