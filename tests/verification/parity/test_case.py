from __future__ import annotations

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.verification.parity.case import RECIPES, build_batch
from mcore_qwen3vl.verification.parity.matrix import Matrix


@pytest.fixture(scope="module")
def architecture(matrix: Matrix) -> Architecture:
    return matrix.reference("dense").architecture


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("multiple", [1, 8])
def test_a_batch_is_what_its_name_says(architecture, name, multiple):
    batch = build_batch(name, architecture, multiple=multiple)
    assert len(batch.micro_batches) == 4
    for micro in batch.micro_batches:
        assert micro.input_ids.shape[1] % multiple == 0
        assert micro.labels.shape == micro.loss_mask.shape == micro.input_ids.shape
        assert micro.position_ids.shape == (3, *micro.input_ids.shape)
        if micro.visual is not None:  # then time, height and width differ from one another
            time, height, width = micro.position_ids
            assert (time != height).any()
            assert (time != width).any()
            assert (height != width).any()
        padded = micro.attention_mask is not None
        assert padded == name.startswith(("padded", "packed"))
    kinds = {len(micro.input_ids) for micro in batch.micro_batches}
    assert kinds == ({2} if name.startswith("padded") else {1})
    assert batch.uneven == (name == "ragged")
    assert batch.padded_left == (name == "padded-left")
    assert (batch.micro_batches[0].cu_seqlens is not None) == (name == "packed")
    assert all(m.visual is None for m in batch.micro_batches) == (name == "text")


def test_the_last_ranks_of_imageless_have_no_image(architecture):
    batch = build_batch("imageless", architecture)
    has_image = [micro.visual is not None for micro in batch.micro_batches]
    assert has_image == [True, True, False, False]
    assert [list(batch.numbers_of_rank(rank, 2)) for rank in range(2)] == [[0, 1], [2, 3]]


def test_every_sample_of_a_pack_starts_where_cu_seqlens_says(architecture):
    for micro in build_batch("packed", architecture, multiple=4).micro_batches:
        starts = [span.start for span in micro.spans]
        assert micro.cu_seqlens.tolist()[:-2] == starts
        assert micro.cu_seqlens[-1] == micro.input_ids.shape[1] > micro.cu_seqlens[-2]
        for span in micro.spans:
            assert torch.equal(micro.input_ids[span.tokens], span.sample.input_ids)
            assert micro.loss_mask[0, span.start + len(span.sample.input_ids) - 1] == 0


def test_the_same_name_gives_the_same_content(architecture):
    one, other = (build_batch("mixed", architecture) for _ in range(2))
    for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
        assert torch.equal(a.input_ids, b.input_ids)
        assert torch.equal(a.visual.pixel_values, b.visual.pixel_values)
