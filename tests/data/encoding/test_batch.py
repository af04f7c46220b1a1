"""A packed batch holds its samples side by side and nothing else; a padded one, one a row."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen3VLModel

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import IGNORED, Batch, Counts, DataConfig
from mcore_qwen3vl.data.encoding.batch import Batcher
from mcore_qwen3vl.data.encoding.pixels import PixelLoader
from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.embedding import Scores
from mcore_qwen3vl.losses.reward import Margins
from mcore_qwen3vl.model.inputs import PixelScale
from tests.data.encoding.test_planning import RECORDS, planned

SCALE = PixelScale(torch.zeros(1), torch.ones(1))
NAMES = ["many_images", "video_and_image", "text", "multi_turn", "image", "video"]


def encoded(processor: Any, media: Path, name: str, weight: float = 1.0) -> Plan:
    plan, _ = planned(processor, {**RECORDS[name], "weight": weight}, media)
    return replace(plan, pixels=PixelLoader(processor).load(plan.media))


@pytest.fixture
def samples(processor: Any, media: Path) -> list[Plan]:
    return [encoded(processor, media, name, 1 + i / 4) for i, name in enumerate(NAMES)]


def batcher(architecture: Architecture, **config: Any) -> Batcher:
    return Batcher(architecture, DataConfig(**config), pad_id=283, pixel_scale=SCALE)


def bounds(batch: Batch) -> list[tuple[int, int]]:
    assert batch.cu_seqlens is not None
    edges = batch.cu_seqlens.tolist()
    return list(pairwise(edges))


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_packed_batch_is_its_samples(
    multiple: int, architecture: Architecture, samples: list[Plan]
) -> None:
    total = sum(-(-len(s.input_ids) // multiple) * multiple for s in samples)
    length = total + 5 * multiple
    packed = batcher(
        architecture, seq_length=length, packing=True, length_multiple=multiple
    ).pack(samples, NAMES)  # fmt: skip
    assert packed.input_ids.shape == (1, length)
    assert packed.position_ids.shape == (3, 1, length)
    pieces = bounds(packed)
    assert len(pieces) == len(samples) + 1
    assert pieces[-1] == (total, length)
    assert packed.max_seqlen == max(end - start for start, end in pieces)
    assert packed.visual is not None

    patches = features = 0
    for sample, (start, end) in zip(samples, pieces, strict=False):
        assert start % multiple == end % multiple == 0
        alone = batcher(architecture, seq_length=len(sample.input_ids)).pad([sample], ["alone"])
        real = len(sample.input_ids)
        inside, padding = slice(start, start + real), slice(start + real, end)
        assert torch.equal(packed.input_ids[0, inside], alone.input_ids[0])
        assert torch.equal(packed.position_ids[:, 0, inside], alone.position_ids[:, 0])
        assert torch.equal(packed.labels[0, inside], alone.labels[0])
        assert torch.equal(packed.loss_weights[0, inside], alone.loss_weights[0])
        assert not packed.padding_mask[0, inside].any()
        assert packed.padding_mask[0, padding].all()
        assert not packed.position_ids[:, 0, padding].any()
        assert (packed.labels[0, padding] == IGNORED).all()
        assert not packed.loss_weights[0, padding].any()
        if alone.visual is not None:
            patches += len(alone.visual.pixel_values)
            features += len(alone.visual.token_index)
    every = [s.pixels.pixel_values for s in samples] + [
        s.pixels.pixel_values_videos for s in samples
    ]
    expected = torch.cat([values for values in every if values is not None])
    assert torch.equal(packed.visual.pixel_values, expected)
    assert packed.visual.pixel_scale is SCALE
    assert len(expected) == patches == packed.counts.patches
    assert len(packed.visual.token_index) == features
    assert packed.padding_mask[0, pieces[-1][0] :].all()
    assert packed.counts == Counts(
        samples=6,
        tokens=sum(len(s.input_ids) for s in samples),
        capacity=length,
        trained_tokens=int((packed.labels != IGNORED).sum()),
        images=5,
        videos=3,
        patches=patches,
    )


def test_labels_are_the_next_tokens_of_the_same_sample(
    architecture: Architecture, samples: list[Plan]
) -> None:
    packed = batcher(architecture, seq_length=2048, packing=True).pack(samples, NAMES)
    tokens, labels, weights = packed.input_ids[0], packed.labels[0], packed.loss_weights[0]
    for sample, (start, end) in zip(samples, bounds(packed), strict=False):
        for t in range(start, end - 1):
            weight = sample.loss_weights[t - start + 1]
            assert weights[t] == weight
            assert labels[t] == (tokens[t + 1] if weight > 0 else IGNORED)
        assert labels[end - 1] == IGNORED
        assert weights[end - 1] == 0


def test_positions_are_hf_s(
    architecture: Architecture, samples: list[Plan], processor_dir: Path
) -> None:
    model = Qwen3VLModel._from_config(AutoConfig.from_pretrained(processor_dir))
    packed = batcher(architecture, seq_length=2048, packing=True).pack(samples, NAMES)
    for sample, (start, end) in zip(samples, bounds(packed), strict=False):
        ids = torch.from_numpy(sample.input_ids)[None]
        kinds = (ids == architecture.image_token_id) + 2 * (ids == architecture.video_token_id)
        expected, _ = model.get_rope_index(
            ids,
            image_grid_thw=sample.pixels.image_grid_thw,
            video_grid_thw=sample.pixels.video_grid_thw,
            mm_token_type_ids=kinds.int(),
        )
        assert torch.equal(packed.position_ids[:, :, start:end], expected)


def test_a_padded_batch_has_one_sample_a_row(
    architecture: Architecture, samples: list[Plan]
) -> None:
    longest = max(len(s.input_ids) for s in samples)
    for to_longest, multiple, width in [(False, 1, 512), (True, 1, longest), (True, 64, 256)]:
        batch = batcher(
            architecture,
            seq_length=512,
            micro_batch_size=6,
            pad_to_longest=to_longest,
            length_multiple=multiple,
        ).pad(samples, NAMES)
        assert batch.input_ids.shape == (6, width)
        assert batch.cu_seqlens is batch.max_seqlen is None
        assert batch.visual is not None
        for row, sample in enumerate(samples):
            real = len(sample.input_ids)
            assert batch.input_ids[row, :real].tolist() == sample.input_ids.tolist()
            assert batch.padding_mask[row].tolist() == [False] * real + [True] * (width - real)
        rows = batch.input_ids.flatten()[batch.visual.token_index]
        images = int((batch.input_ids == architecture.image_token_id).sum())
        assert (rows[:images] == architecture.image_token_id).all()
        assert (rows[images:] == architecture.video_token_id).all()


def test_a_batch_crosses_processes_and_moves(
    architecture: Architecture, samples: list[Plan]
) -> None:
    batch = batcher(architecture, seq_length=2048, packing=True).pack(samples, NAMES)
    again = pickle.loads(pickle.dumps(batch))
    assert again.counts == batch.counts
    assert torch.equal(again.position_ids, batch.position_ids)
    moved = batch.to("meta")
    assert moved.visual is not None
    assert moved.input_ids.is_meta
    assert moved.visual.pixel_values.is_meta
    assert not moved.visual.grid_thw.is_meta
    text = batcher(architecture, seq_length=256).pad([samples[2]], ["text"])
    assert text.visual is None
    assert text.to("meta").cu_seqlens is None


def test_a_loss_refuses_a_batch_for_another(
    architecture: Architecture, samples: list[Plan]
) -> None:
    batch = batcher(architecture, seq_length=256).pad([samples[2]], ["text"])
    scored = replace(batch, task=Scores(torch.ones(1)))
    assert scored.inputs_of(Scores) is scored.task
    for other, held in ((batch, "None"), (scored, "Scores")):
        with pytest.raises(BadInput, match=f"whose task is Margins, and this one's is {held}"):
            other.inputs_of(Margins)


def test_counts_add_up() -> None:
    assert Counts(samples=1, tokens=5) + Counts(samples=2, skipped=3) == Counts(
        samples=3, tokens=5, skipped=3
    )
