"""A block gives the same bits whatever it keeps, and Hugging Face's numbers with our kernels."""

from __future__ import annotations

import copy
import gc
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionBlock

from mcore_qwen3vl.model.vision_block import adapt_block
from tests.kernels.interpreted import interpreted_json

FRAMES, HIDDEN, INNER = (4, 6), 24, 52


def block() -> Any:
    config = Qwen3VLVisionConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_heads=3, depth=1)
    config._attn_implementation = "eager"
    made = Qwen3VLVisionBlock(config)
    torch.manual_seed(1)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.4, 0.3)
    return made


def storage_of(output: Tensor | tuple[Tensor, ...]) -> StorageWeakRef:
    tensor = output[0] if isinstance(output, tuple) else output
    return StorageWeakRef(tensor.untyped_storage())


def run(model: Any, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor], list[bool]]:
    """Return the output, all gradients, and whether each norm's and activation's output is kept."""
    made: list[StorageWeakRef] = []
    for name in ("norm1", "norm2", "mlp.act_fn"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output: made.append(storage_of(output))
        )
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(FRAMES), HIDDEN, generator=generator).to(dtype).requires_grad_()
    angles = torch.randn(sum(FRAMES), HIDDEN // 6, generator=generator).repeat(1, 2)
    out = model(
        x,
        cu_seqlens=torch.tensor([0, FRAMES[0], sum(FRAMES)], dtype=torch.int32),
        position_embeddings=(angles.cos(), angles.sin()),
        frame_patches=FRAMES,
    )
    gc.collect()  # Triton's interpreter keeps the arguments of its last kernel in a cycle
    kept = [not storage.expired() for storage in made]
    out.square().sum().backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return out.detach(), {"input": x.grad, **gradients}, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lean_blocks_give_the_same_bits_out_of_less_memory(dtype: torch.dtype) -> None:
    plain = block().to(dtype)
    lean = copy.deepcopy(plain)
    adapt_block(plain, lean=False)
    adapt_block(lean, lean=True)
    (out, gradients, kept), (same, also, less) = run(plain, dtype), run(lean, dtype)
    assert torch.equal(out, same)
    assert all(torch.equal(gradient, also[name]) for name, gradient in gradients.items())
    assert (kept, less) == ([True] * 3, [False] * 3)


def measure(lean: bool) -> dict[str, float]:
    """Return the largest relative errors of a block with our kernels in float32."""
    ours = block()
    exact = copy.deepcopy(ours).double()
    adapt_block(ours, lean=lean)
    (out, gradients, kept), (right, wanted, _) = run(ours, torch.float32), run(exact, torch.float64)
    assert kept == [not lean] * 2, kept  # the activation is a part of the second linear
    found = {"out": out, **gradients}
    return {
        name: float((found[name] - value).abs().max() / value.abs().max())
        for name, value in {"out": right, **wanted}.items()
    }


@pytest.mark.parametrize("lean", [True, False])
def test_a_block_with_our_kernels_has_hugging_faces_numbers(lean: bool) -> None:
    """In a process of its own, where Triton interprets the kernels."""
    found = interpreted_json(__file__)[str(lean)]
    assert len(found) == 14
    assert max(found.values()) < 2e-5, found


if __name__ == "__main__":
    print(json.dumps({str(lean): measure(lean) for lean in (True, False)}))
