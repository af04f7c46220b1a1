"""The tower on one rank has Hugging Face's numbers and names, and needs no host sync."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from mcore_qwen3vl.model.fusion import add_features, fuse, plan_fusion
from mcore_qwen3vl.model.inputs import PixelScale, VisualInputs
from mcore_qwen3vl.model.vision import VisionTower
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
    visual = MIXED.visual()
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
    raw = as_bytes(MIXED.visual())
    pixels = (raw.pixel_values.float() - raw.pixel_scale.mean) / raw.pixel_scale.std
    made = tower()
    got = made(raw)[0]
    assert torch.equal(got, made(replace(raw, pixel_values=pixels, pixel_scale=None))[0])


@pytest.mark.parametrize(("hf_class", "hf_config"), HF_TOWERS, ids=["dense", "moe"])
def test_names_and_shapes_are_hugging_faces(hf_class, hf_config):
    hf = hf_class(hf_config(**asdict(ARCHITECTURE.vision)))
    shapes = {name: tensor.shape for name, tensor in hf.state_dict().items()}
    assert {name: tensor.shape for name, tensor in tower().state_dict().items()} == shapes


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
        features, deepstack = model(MIXED.visual())
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


def test_built_on_meta_and_filled_later():
    with torch.device("meta"):
        made = VisionTower(
            ARCHITECTURE, TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        )
    assert all(p.is_meta for p in made.parameters())
    made.to_empty(device="cpu")
    assert torch.equal(made.rotary_pos_emb.inv_freq, tower().rotary_pos_emb.inv_freq)


class NoHostSync(TorchDispatchMode):
    """Refuse every operator on `device` whose result or shape depends on the numbers in it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.on_device = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.device.type == self.device for tensor in tensors):
            self.on_device += 1
            forbidden = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
            if forbidden & set(func.tags):
                raise AssertionError(f"{func} waits for the device")
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "sync",
    [
        lambda t: t.sum().item(),
        lambda t: torch.nonzero(t),
        lambda t: t[t > 0],
        lambda t: torch.repeat_interleave(t),
        lambda t: t.masked_select(t > 0),
    ],
)
def test_the_guard_sees_a_sync(sync):
    with NoHostSync("cpu"), pytest.raises(AssertionError, match="waits for the device"):
        sync(torch.arange(3))


@pytest.mark.parametrize(
    ("visual", "batch_size"),
    [(MIXED.visual(), 2), (as_bytes(MIXED.visual()), 2), (None, 1)],
    ids=["images", "bytes", "text only"],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_forward_and_backward_read_nothing_from_the_device(visual, batch_size, recompute):
    """On the ``meta`` device, which has no numbers, any read fails, tagged or not."""
    model = tower(recompute=recompute).to("meta")
    token_index = None if visual is None else visual.token_index
    visual = None if visual is None else visual.to("meta")
    with NoHostSync("meta") as guard:
        features, deepstack_features = model(visual)
        plan = plan_fusion(
            token_index, torch.arange(SEQ), seq_len=SEQ, batch_size=batch_size, device="meta"
        )
        embeddings = torch.empty(
            SEQ, batch_size, ARCHITECTURE.hidden_size, device="meta", dtype=DTYPE
        )
        hidden = fuse(embeddings, features, plan)
        hidden = add_features(hidden, plan.select(deepstack_features[0]), plan.destination)
        hidden.sum().backward()
    assert guard.on_device > 100
    assert all(p.grad is not None for p in model.blocks.parameters())
