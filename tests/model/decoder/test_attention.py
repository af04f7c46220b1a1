"""Which keys a query may see, and rotary angles and rotation, which equal Hugging Face's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.model.decoder.attention import (
    InterleavedMRoPE,
    PackedSequence,
    _mask,
    causal_segments,
    rotary_factor,
    rotate,
    rotate_fused,
)
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

CPU = torch.device("cpu")


def test_every_query_sees_something_and_no_token_sees_padding() -> None:
    valid = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]).bool()
    mask = _mask(4, 4, valid)
    assert mask is not None
    assert mask.any(-1).all(), "a row without any key is NaN in some kernels"
    expected = torch.ones(4, 4).tril().bool() & valid[:, None, :]
    assert torch.equal(mask[:, 0][valid], expected[valid])


def test_cumulative_lengths_for_the_varlen_kernel() -> None:
    """The second sample is empty."""
    queries, keys = causal_segments((0, 4, 4, 12), 2, 0, CPU).cu_seqlens
    assert queries.tolist() == [0, 1, 2, 4, 6]
    assert keys.tolist() == [0, 1, 5, 7, 15]
    assert queries.dtype == keys.dtype == torch.int32


def test_padding_that_ends_a_sample_is_attended_to_as_a_part_of_it() -> None:
    """Were it told of the padding, TE's ring attention would read memory that no kernel wrote."""
    bounds = torch.tensor([0, 8, 24], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=torch.tensor([0, 5, 18], dtype=torch.int32),
        cu_seqlens_kv=torch.tensor([0, 5, 18], dtype=torch.int32),
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=13,
        max_seqlen_kv=13,
    )
    packed = PackedSequence.from_params(params, CPU)
    assert packed.bounds == (0, 8, 24)
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 8, 24]
    assert packed.cu_seqlens_q_padded is packed.cu_seqlens_kv_padded is None
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 16


DOCUMENTED = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 262144}
"""Qwen's documented extension to a million tokens."""
SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "yarn": DOCUMENTED,
    "yarn, older key": {**DOCUMENTED, "rope_type": None, "type": "yarn"},
    "yarn, original length left out": {"rope_type": "yarn", "factor": 4.0},
    "yarn, every option": {
        **DOCUMENTED,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn, attention_factor": {**DOCUMENTED, "attention_factor": 1.25},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("name", SCALED)
def test_rotary_angles_equal_hugging_faces(name: str) -> None:
    config = read_config_file(PUBLISHED / "8b.json")
    text = config["text_config"]
    plain = InterleavedMRoPE(Architecture.from_hf(config))
    given = {key: value for key, value in SCALED[name].items() if value is not None}
    rope = {key: value for key, value in text["rope_scaling"].items() if key != "rope_type"}
    text |= {"rope_scaling": rope | given, "max_position_embeddings": 1_000_000}
    architecture = Architecture.from_hf(config)
    ours = InterleavedMRoPE(architecture)
    reference = Qwen3VLTextRotaryEmbedding(AutoConfig.for_model(**config).text_config)
    positions = torch.randint(0, 1_000_000, (3, 2, 64), generator=torch.Generator().manual_seed(1))
    angles = ours(positions).squeeze(2).transpose(0, 1)  # (B, S, D)
    cosine, sine = reference(torch.zeros(1), positions)
    assert torch.equal(angles.cos() * ours.attention_scaling, cosine)
    assert torch.equal(angles.sin() * ours.attention_scaling, sine)
    scale = transformer_config(architecture).softmax_scale or architecture.head_dim**-0.5
    assert scale == pytest.approx(reference.attention_scaling**2 / architecture.head_dim**0.5)
    same = torch.equal(ours.inverse_frequency, plain.inverse_frequency)
    assert same == (name == "default")


@pytest.mark.parametrize("name", ["default", "yarn"])
def test_a_part_of_each_head_turns_as_in_hugging_face(name: str) -> None:
    config = tiny_config(family="qwen3.5")
    text = config["text_config"]
    text |= {"max_position_embeddings": 1_000_000}
    text["rope_parameters"] |= SCALED[name]
    architecture = Architecture.from_hf(config)
    ours, factor = InterleavedMRoPE(architecture), rotary_factor(architecture)
    reference = Qwen3_5TextRotaryEmbedding(AutoConfig.for_model(**config).text_config)
    positions = torch.randint(0, 1_000_000, (3, 2, 64), generator=torch.Generator().manual_seed(1))
    angles = ours(positions).squeeze(2).transpose(0, 1)  # (B, S, R)
    cosine, sine = reference(torch.zeros(1), positions)
    assert torch.equal(angles.cos() * factor, cosine)
    assert torch.equal(angles.sin() * factor, sine)
    # The factor is not that of whole products, so that the scale is not to have it.
    assert transformer_config(architecture).softmax_scale is None
    assert (factor == 1) == (name == "default")


LENGTH, BATCH, HEADS, WIDTH = 7, 2, 3, 10
PART = 6
"""The values of each head that turn, in models with a partial rotation."""


def given(batch: int, rotated: int = WIDTH) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(LENGTH, BATCH, HEADS, WIDTH, generator=random, dtype=torch.float64)
    half = 3 * torch.randn(LENGTH, batch, 1, rotated // 2, generator=random, dtype=torch.float64)
    return x, torch.cat([half, half], -1)


def plain(x: Tensor, angles: Tensor) -> Tensor:
    x, rest = x.split((angles.shape[-1], WIDTH - angles.shape[-1]), -1)
    first, second = x.chunk(2, -1)
    turned = x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([turned, rest], -1)


def unfused_kernel(x: Tensor, angles: Tensor) -> Tensor:
    """Stand in for Transformer Engine's kernel, which takes one row of angles for the batch."""
    assert angles.shape[:3] == (len(x), 1, 1)
    return plain(x, angles)


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rotated", [WIDTH, PART])
def test_the_rotation_equals_plain_torch(
    monkeypatch: pytest.MonkeyPatch, batch: int, fused: bool, rotated: int
) -> None:
    name = "fused_apply_rotary_pos_emb"
    monkeypatch.setattr(transformer_engine, name, unfused_kernel, raising=False)
    x, angles = given(batch, rotated)
    results = []
    for by_plain in (True, False):
        own = x.clone().requires_grad_()
        if by_plain:
            turned = plain(own, angles)
        elif fused:
            turned = rotate_fused(own, angles)
        else:
            half = angles[..., : rotated // 2]
            turned = rotate(own, half.cos(), half.sin())
        assert turned.shape == x.shape
        (gradient,) = torch.autograd.grad((turned * x.exp()).sum(), own)
        results.append((turned.detach(), gradient))
    torch.testing.assert_close(results[1], results[0], rtol=1e-13, atol=1e-13)


def test_exact_tables_round_once() -> None:
    x, angles = given(1)
    half = angles[..., : WIDTH // 2].float()
    found = rotate(x.bfloat16(), half.cos(), half.sin())
    right = plain(x.bfloat16().double(), torch.cat([half, half], -1).double())
    assert found.dtype == torch.bfloat16
    assert ((found.double() - right).abs() <= 1.001 * 2**-8 * right.abs()).all()
