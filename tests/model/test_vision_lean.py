"""Vision blocks that recompute cheap tensors give the same bits in less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionBlock

from mcore_qwen3vl.model.vision import make_lean

PATCHES, HIDDEN, INNER = 10, 24, 52


def block() -> Any:
    config = Qwen3VLVisionConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_heads=3, depth=1)
    config._attn_implementation = "eager"
    made = Qwen3VLVisionBlock(config)
    torch.manual_seed(1)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.4, 0.3)
    return made


def run(model: Any, x: Tensor) -> tuple[Tensor, list[Tensor], list[bool]]:
    """Return the output, all gradients, and whether each norm's and activation's output is kept."""
    made: list[StorageWeakRef] = []
    for name in ("norm1", "norm2", "mlp.act_fn"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output: made.append(StorageWeakRef(output.untyped_storage()))
        )
    x = x.clone().requires_grad_()
    angles = torch.randn(PATCHES, HIDDEN // 3, generator=torch.Generator().manual_seed(2))
    out = model(
        x,
        cu_seqlens=torch.tensor([0, 4, PATCHES], dtype=torch.int32),
        position_embeddings=(angles.cos(), angles.sin()),
    )
    kept = [not storage.expired() for storage in made]
    out.square().sum().backward()
    assert x.grad is not None
    return out.detach(), [x.grad, *(p.grad for p in model.parameters())], kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_out_of_less_memory(dtype: torch.dtype) -> None:
    plain = block().to(dtype)
    lean = copy.deepcopy(plain)
    make_lean(lean)
    x = torch.randn(PATCHES, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    (out, gradients, kept), (same, also, less) = run(plain, x), run(lean, x)
    assert torch.equal(out, same)
    assert all(torch.equal(a, b) for a, b in zip(gradients, also, strict=True))
    assert (kept, less) == ([True] * 3, [False] * 3)


def test_parameters_are_the_same_objects() -> None:
    plain = block()
    before = dict(plain.named_parameters())
    make_lean(plain)
    after = dict(plain.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert after.keys() == before.keys()


def test_without_gradients_nothing_is_kept() -> None:
    lean = block()
    make_lean(lean)
    with torch.no_grad():
        run_without = lean(
            torch.ones(PATCHES, HIDDEN),
            cu_seqlens=torch.tensor([0, PATCHES], dtype=torch.int32),
            position_embeddings=(torch.ones(PATCHES, 8), torch.zeros(PATCHES, 8)),
        )
    assert run_without.grad_fn is None
