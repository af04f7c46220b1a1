"""Position ids equal Hugging Face's, in transformers 5 (live) and 4.57 (recorded)."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLModel

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.batch import mrope_position_ids
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

Segment = int | tuple[str, int, int, int]
"""A count of text tokens, or ("image" | "video", frames, rows, columns) in patches."""


@dataclass
class Sample:
    """One sequence: its token ids, and the grids of its images and of its videos in order."""

    tokens: list[int] = field(default_factory=list)
    images: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[tuple[int, int, int]] = field(default_factory=list)


def sample(architecture: Architecture, segments: list[Segment], rng: random.Random) -> Sample:
    """Make token ids for `segments`, with a two-token timestamp before each frame of a video."""
    special = {
        architecture.image_token_id,
        architecture.video_token_id,
        architecture.vision_start_token_id,
        architecture.vision_end_token_id,
    }
    text = [i for i in range(architecture.vocab_size) if i not in special]
    out = Sample()
    for segment in segments:
        if isinstance(segment, int):
            out.tokens += rng.choices(text, k=segment)
            continue
        kind, *grid = segment
        frames, rows, columns = grid
        (out.images if kind == "image" else out.videos).append((frames, rows, columns))
        token = architecture.image_token_id if kind == "image" else architecture.video_token_id
        run = [token] * (rows * columns // architecture.vision.spatial_merge_size**2)
        for _ in range(frames):
            out.tokens += rng.choices(text, k=2) if kind == "video" else []
            out.tokens += [architecture.vision_start_token_id, *run]
            out.tokens += [architecture.vision_end_token_id]
    return out


def random_segments(rng: random.Random, merge: int = 2) -> list[Segment]:
    """Draw text around up to four images and videos of different shapes."""
    segments: list[Segment] = [rng.randint(1, 6)]
    for _ in range(rng.randint(0, 4)):
        kind = rng.choice(["image", "video"])
        frames = 1 if kind == "image" else rng.randint(1, 3)
        segments.append((kind, frames, merge * rng.randint(1, 5), merge * rng.randint(1, 5)))
        if rng.random() < 0.7:  # otherwise the next image follows at once
            segments.append(rng.randint(1, 9))
    return segments


def grids(samples: list[Sample], kind: str) -> Tensor | None:
    """Return the (n, 3) grids of all `samples`, in order."""
    rows = [grid for one in samples for grid in getattr(one, f"{kind}s")]
    return torch.tensor(rows) if rows else None


def pad(samples: list[Sample], side: str, pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Return (B, S) token ids and attention mask, padded on the ``left`` or ``right``."""
    width = max(len(one.tokens) for one in samples)
    ids = torch.full((len(samples), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(samples):
        n = len(one.tokens)
        place = slice(width - n, width) if side == "left" else slice(n)
        ids[row, place] = torch.tensor(one.tokens)
        mask[row, place] = 1
    return ids, mask


ARCHITECTURE = Architecture.from_hf(tiny_config())
RECORDED = json.loads(Path(__file__).with_name("rope_index_4_57.json").read_text())["cases"]


@pytest.fixture(scope="module")
def hf_model() -> Qwen3VLModel:
    with torch.device("meta"):
        return Qwen3VLModel(Qwen3VLConfig(**tiny_config()))


def hf_rope_index(model, samples, ids, mask):
    kinds = torch.zeros_like(ids)
    kinds[ids == ARCHITECTURE.image_token_id] = 1
    kinds[ids == ARCHITECTURE.video_token_id] = 2
    return model.get_rope_index(
        ids, kinds, grids(samples, "image"), grids(samples, "video"), attention_mask=mask
    )


def ours(samples: list[Sample], ids, mask=None, cu_seqlens=None):
    images, videos = grids(samples, "image"), grids(samples, "video")
    return mrope_position_ids(ARCHITECTURE, ids, images, videos, mask, cu_seqlens)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("seed", range(20))
def test_equals_transformers_5(hf_model, seed, side):
    rng = random.Random(seed)
    samples = [sample(ARCHITECTURE, random_segments(rng), rng) for _ in range(rng.randint(1, 4))]
    ids, mask = pad(samples, side)
    positions, deltas = ours(samples, ids, mask)
    expected, expected_deltas = hf_rope_index(hf_model, samples, ids, mask)
    assert positions.dtype == torch.int64
    assert torch.equal(positions, expected)
    assert torch.equal(deltas, expected_deltas)


def test_random_batches_cover_every_kind():
    rng = [random.Random(seed) for seed in range(20)]
    samples = [
        [sample(ARCHITECTURE, random_segments(r), r) for _ in range(r.randint(1, 4))] for r in rng
    ]
    flat = [one for batch in samples for one in batch]
    assert any(frames > 1 for one in flat for frames, _, _ in one.videos)
    assert any(one.images and one.videos for one in flat)
    assert any(not one.images and not one.videos for one in flat)
    assert any(len({len(one.tokens) for one in batch}) > 1 for batch in samples)  # padding


@pytest.mark.parametrize("case", RECORDED, ids=[case["name"] for case in RECORDED])
def test_equals_transformers_4_57(case):
    case = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in case.items()}
    ids, mask = case["input_ids"], case["attention_mask"]
    positions, deltas = mrope_position_ids(
        ARCHITECTURE, ids, case["image_grid_thw"], case["video_grid_thw"], mask
    )
    valid = mask.bool()
    assert torch.equal(positions[:, valid], case["position_ids"][:, valid])
    assert not positions[:, ~valid].any()
    padding = (mask == 0).sum(1, keepdim=True)
    assert torch.equal(deltas - padding, case["rope_deltas"])


def test_text_counts_up():
    positions, deltas = mrope_position_ids(ARCHITECTURE, torch.randint(0, 99, (2, 7)))
    assert torch.equal(positions, torch.arange(7).expand(3, 2, 7))
    assert torch.equal(deltas, torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("seed", range(5))
def test_packed_restarts_at_every_sample(hf_model, seed):
    rng = random.Random(100 + seed)
    samples = [sample(ARCHITECTURE, random_segments(rng), rng) for _ in range(4)]
    tail = Sample(tokens=[0] * 5)  # padding counts as one more sample
    packed = torch.tensor([[t for one in [*samples, tail] for t in one.tokens]])
    bounds = torch.tensor([0] + [len(one.tokens) for one in [*samples, tail]]).cumsum(0)
    positions, deltas = ours(samples, packed, cu_seqlens=bounds)
    for i, one in enumerate(samples):
        alone = torch.tensor([one.tokens])
        expected, delta = hf_rope_index(hf_model, [one], alone, None)
        assert torch.equal(positions[:, :, bounds[i] : bounds[i + 1]], expected)
        assert deltas[i] == delta
    assert torch.equal(positions[0, 0, -5:], torch.arange(5))


def test_images_that_touch_across_packed_samples_are_two():
    """The last token of one sample and the first of the next may both be placeholders."""
    token = ARCHITECTURE.image_token_id
    ids = torch.tensor([[7, token, token, token, 8]])
    positions, _ = mrope_position_ids(
        ARCHITECTURE,
        ids,
        image_grid_thw=torch.tensor([[1, 2, 2], [1, 2, 4]]),
        cu_seqlens=torch.tensor([0, 2, 5]),
    )
    assert positions[2, 0].tolist() == [0, 1, 0, 1, 2]


def test_picklable():
    samples = [sample(ARCHITECTURE, [3, ("image", 1, 4, 6)], random.Random(0))]
    ids, mask = pad(samples, "left")
    function = pickle.loads(pickle.dumps(mrope_position_ids))
    assert torch.equal(
        function(ARCHITECTURE, ids, grids(samples, "image"), None, mask)[0][2, 0, -1:],
        torch.tensor([3 + 1 + 3]),
    )


@pytest.mark.parametrize(
    ("images", "videos", "says"),
    [
        (None, [[2, 4, 4]], r"1 runs of image placeholders, but image_grid_thw describes 0"),
        ([[1, 4, 6], [1, 2, 2]], [[2, 4, 4]], "describes 2 image frames"),
        ([[1, 4, 4]], [[2, 4, 4]], r"image frame 0 has 6 placeholders.*2 x 2.*needs 4"),
        ([[1, 4, 6]], [[3, 4, 4]], r"2 runs of video placeholders, .* describes 3"),
        ([[2, 4, 6]], [[2, 4, 4]], "2 frames; pass it as a video"),
    ],
)
def test_grids_that_do_not_fit_the_placeholders(images, videos, says):
    one = sample(ARCHITECTURE, [2, ("image", 1, 4, 6), ("video", 2, 4, 4)], random.Random(0))
    with pytest.raises(BadInput, match=says):
        mrope_position_ids(
            ARCHITECTURE,
            torch.tensor([one.tokens]),
            None if images is None else torch.tensor(images),
            None if videos is None else torch.tensor(videos),
        )


def test_cu_seqlens_that_leave_the_tail_out():
    with pytest.raises(BadInput, match="ends at 5, but the packed batch has 8 tokens"):
        mrope_position_ids(
            ARCHITECTURE, torch.ones(1, 8, dtype=torch.int64), cu_seqlens=torch.tensor([0, 5])
        )
