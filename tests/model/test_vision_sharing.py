"""Frames are shared among ranks evenly, and features return to the original order."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.inputs import visual_inputs
from mcore_qwen3vl.model.vision import VisionTower, assign_frames, share_frames
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from tests.model.visual_batches import ARCHITECTURE

MERGE_UNIT = 4
CONFIG = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
)


# Twenty images (width, height): photographs, screenshots, pages, thumbnails and banners.
MIX = [
    *[(640, 480), (480, 640), (1024, 768), (768, 1024), (1280, 960), (800, 608)],
    *[(1920, 1088), (1280, 736), (1440, 896), (2048, 1152)],
    *[(1248, 1760), (1248, 1760), (832, 1184), (608, 864)],
    *[(256, 256), (224, 320), (384, 384), (512, 512), (96, 608), (1600, 192)],
]


def grids(feature_pixels: int) -> torch.Tensor:
    """Return (20, 3) grids of the mix, with one feature for `feature_pixels` squared."""
    sides = torch.tensor(MIX).flip(1) // feature_pixels  # (20, 2) rows and columns of features
    return torch.cat([torch.ones(len(MIX), 1, dtype=torch.int64), 2 * sides.clamp(min=1)], 1)


def test_twenty_images_on_four_ranks():
    patches = grids(32).prod(1).numpy()
    assert len(patches) == 20
    assert patches.max() > 20 * patches.min()
    shares = [share_frames(torch.from_numpy(patches), MERGE_UNIT, 4, rank) for rank in range(4)]
    loads = [sum(share.frame_patches) for share in shares]
    assert sum(loads) == patches.sum()
    assert max(loads) <= 1.1 * patches.sum() / 4, loads
    # Dividing by the number of images, five a rank in order, would be far from even.
    by_count = patches.reshape(4, 5).sum(1).max()
    assert by_count > 1.4 * patches.sum() / 4


def test_patches_encoded_at_tp2xcp2():
    """Patches are counted where ranks embed them; images have a quarter of their sides here."""
    grid = grids(128)
    total, n = int(grid.prod(1).sum()), int(grid.prod(1).sum()) // MERGE_UNIT
    visual = visual_inputs(
        ARCHITECTURE,
        torch.full((1, n), ARCHITECTURE.image_token_id),
        torch.zeros(total, ARCHITECTURE.vision.patch_dim),
        grid,
    )
    layout = Layout.parse("tp2xcp2")

    def on_rank() -> int:
        initialize(layout)
        encoded: list[int] = []
        group = parallel_state.get_tensor_and_context_parallel_group()
        tower = VisionTower(ARCHITECTURE, CONFIG, group=group)
        tower.patch_embed.register_forward_pre_hook(lambda _, args: encoded.append(len(args[0])))
        with torch.no_grad():
            features, _ = tower(visual)
        assert len(features) == n
        return sum(encoded)

    loads = run_layout(on_rank, 4)
    assert sum(loads) == total
    assert max(loads) <= 1.1 * total / 4, loads


@pytest.mark.parametrize("seed", range(10))
def test_random_mixes_stay_within_a_tenth(seed):
    rng = random.Random(seed)
    patches = np.array([4 * rng.randint(4, 40) * rng.randint(4, 40) for _ in range(20)])
    owners = assign_frames(patches, 4)
    loads = np.bincount(owners, patches, 4)
    assert loads.max() <= 1.1 * patches.sum() / 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("frames", [[], [8], [4, 4, 24, 8], [16] * 6, [4, 40, 8, 8, 12, 4, 20]])
def test_gathered_shares_restore_the_order(frames, ranks):
    """With patches encoded as their own row numbers, the gather gives every feature in order."""
    lengths = torch.tensor(frames, dtype=torch.int64)
    shares = [share_frames(lengths, MERGE_UNIT, ranks, rank) for rank in range(ranks)]
    gathered = torch.full((ranks, shares[0].padded_features), -1)
    for rank, share in enumerate(shares):
        assert share.padded_features == shares[0].padded_features >= 1
        assert torch.equal(share.order, shares[0].order)
        assert sum(share.frame_patches) == len(share.patch_rows)
        features = share.patch_rows[::MERGE_UNIT] // MERGE_UNIT
        gathered[rank, : len(features)] = features
    restored = gathered.flatten()[shares[0].order]
    assert torch.equal(restored, torch.arange(sum(frames) // MERGE_UNIT))


def test_a_video_is_divided_between_its_frames():
    frames = torch.full((8,), 24)
    assert [len(share_frames(frames, MERGE_UNIT, 4, r).frame_patches) for r in range(4)] == [2] * 4


def test_picklable():
    share = share_frames(torch.tensor([8, 4]), MERGE_UNIT, 2, 0)
    assert pickle.loads(pickle.dumps(share)).frame_patches == share.frame_patches == (8,)
