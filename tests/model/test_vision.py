"""The tower has Hugging Face's numbers and names, shares frames evenly, and waits for nothing."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.layer import add_to_rows
from mcore_qwen3vl.model.inputs import PixelScale, VisualInputs, visual_inputs
from mcore_qwen3vl.model.qwen3vl import fuse, plan_fusion
from mcore_qwen3vl.model.vision import VisionTower, assign_frames, share_frames
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from tests.model.visual_batches import ARCHITECTURE, DTYPE, SEQ, batch, exact_rotary, vision_weights

MIXED = batch([("image", 1, 4, 6), ("video", 2, 4, 2)], [("image", 1, 8, 4)])
HF_TOWERS = [
    (Qwen3VLVisionModel, Qwen3VLVisionConfig),
    (Qwen3VLMoeVisionModel, Qwen3VLMoeVisionConfig),
]


def tower(dtype: torch.dtype = DTYPE, **options: bool) -> VisionTower:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )
    made = VisionTower(ARCHITECTURE, config, **options)
    made.load_state_dict(vision_weights())
    return made


@pytest.mark.parametrize(("hf_class", "hf_config"), HF_TOWERS, ids=["dense", "moe"])
def test_equals_hugging_face(hf_class, hf_config):
    """Both load the same tensors strictly, so that names and shapes are the same."""
    visual = MIXED.visual
    hf = hf_class(hf_config(**asdict(ARCHITECTURE.vision))).to(DTYPE)
    hf.rotary_pos_emb.float()  # from_pretrained keeps it so; in older versions `to` casts it
    hf.load_state_dict(vision_weights())
    with exact_rotary(hf_class):
        expected = hf(visual.pixel_values, visual.grid_thw)
    features, deepstack = tower()(visual)
    wanted = [expected.pooler_output, *expected.deepstack_features]
    assert len(wanted) == 4
    for got, want in zip([features, *deepstack], wanted, strict=True):
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-9 * want.abs().max()


def as_bytes(visual: VisualInputs) -> VisualInputs:
    """Return other pixels of the same shape, as bytes that are not normalised yet."""
    generator = torch.Generator().manual_seed(6)
    shape = visual.pixel_values.shape
    scale = PixelScale(*(torch.rand(shape[1], generator=generator) * 60 + low for low in (100, 30)))
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return replace(visual, pixel_values=pixels, pixel_scale=scale)


def test_bytes_are_normalised_before_they_are_encoded():
    raw = as_bytes(MIXED.visual)
    pixels = (raw.pixel_values.float() - raw.pixel_scale.mean) / raw.pixel_scale.std
    made = tower()
    got = made(raw)[0]
    assert torch.equal(got, made(replace(raw, pixel_values=pixels, pixel_scale=None))[0])


def test_text_only_gives_no_features_and_zero_gradients_everywhere():
    model = tower()
    features, deepstack = model(None)
    assert [f.shape for f in (features, *deepstack)] == [(0, ARCHITECTURE.hidden_size)] * 4
    (features.sum() + sum(layer.sum() for layer in deepstack)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_recompute_runs_blocks_again_and_changes_no_gradient():
    gradients = []
    for recompute in (False, True):
        model = tower(recompute=recompute)
        runs: list[int] = []
        model.blocks[2].mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        features, deepstack = model(MIXED.visual)
        (features.sin().sum() + sum(layer.cos().sum() for layer in deepstack)).backward()
        assert len(runs) == 1 + recompute
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_half_precision_keeps_rotary_frequencies_exact():
    """Megatron's Float16Module casts every buffer of the model."""
    exact = tower().rotary_pos_emb.inv_freq
    cast = tower().bfloat16()
    assert cast.rotary_pos_emb.inv_freq.dtype == torch.float32
    assert torch.equal(cast.rotary_pos_emb.inv_freq, exact)
    assert not torch.equal(exact.bfloat16().float(), exact)
    assert cast.blocks[0].attn.qkv.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("fused", [True, False])
def test_linears_accumulate_gradients_if_the_config_says_so(fused):
    config = replace(CONFIG, gradient_accumulation_fusion=fused)
    made = VisionTower(ARCHITECTURE, config)
    linears = {
        f"{name}.weight" for name, one in made.named_modules() if isinstance(one, torch.nn.Linear)
    }
    marked = {
        name for name, one in made.named_parameters() if getattr(one, "accumulates_gradient", False)
    }
    assert marked == (linears if fused else set())
    assert len(linears) > 4


def test_built_on_meta_and_filled_later():
    with torch.device("meta"):
        made = VisionTower(
            ARCHITECTURE, TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        )
    assert all(p.is_meta for p in made.parameters())
    made.to_empty(device="cpu")
    assert torch.equal(made.rotary_pos_emb.inv_freq, tower().rotary_pos_emb.inv_freq)


@pytest.mark.parametrize(
    ("visual", "batch_size"),
    [(MIXED.visual, 2), (as_bytes(MIXED.visual), 2), (None, 1)],
    ids=["images", "bytes", "text only"],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_forward_and_backward_read_nothing_from_the_device(visual, batch_size, recompute):
    """A tensor on the ``meta`` device has no numbers: any read fails."""
    model = tower(recompute=recompute).to("meta")
    token_index = None if visual is None else visual.token_index
    visual = None if visual is None else visual.to("meta")
    features, deepstack_features = model(visual)
    plan = plan_fusion(
        token_index, torch.arange(SEQ), seq_len=SEQ, batch_size=batch_size, device="meta"
    )
    embeddings = torch.empty(SEQ, batch_size, ARCHITECTURE.hidden_size, device="meta", dtype=DTYPE)
    hidden = fuse(embeddings, features, plan)
    hidden = add_to_rows(hidden, plan.select(deepstack_features[0]), plan.destination)
    hidden.sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.blocks.parameters())


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


def test_patches_encoded_at_tp2xcp2():
    """Patches are counted where ranks embed them; images have a quarter of their sides here."""
    grid = grids(128)
    # Dividing by the number of images, five a rank in order, would be far from even.
    assert grid.prod(1).view(4, 5).sum(1).max() > 1.4 * grid.prod(1).sum() / 4
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
