"""A micro-batch goes through a chunk with its padding masked for the router alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.batch import Batch, Counts
from mcore_qwen3vl.forward import forward
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.attention import TorchAttention
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.verification.parity.case import MicroBatch, build_batch


def batch_of(micro: MicroBatch) -> Batch:
    assert micro.attention_mask is not None
    return Batch(
        micro.input_ids,
        micro.labels,
        micro.loss_mask,
        micro.position_ids,
        micro.attention_mask == 0,
        None,
        None,
        micro.visual,
        Counts(),
        (),
    )


def _losses(model: Path) -> tuple[Tensor, Tensor, list[Any], list[Tensor]]:
    """Return losses of training's forward and of one with a mask, and the masks of both kinds."""
    initialize(Layout())
    architecture = Architecture.from_hf(model)
    (chunk,) = build_chunks(architecture, Layout(), params_dtype=torch.float32)
    micro = build_batch("padded", architecture).micro_batches[0]
    masks: list[Any] = []
    padding: list[Tensor] = []
    for module in chunk.decoder.modules():
        if isinstance(module, TorchAttention):
            module.register_forward_pre_hook(lambda m, inputs: masks.append(inputs[3]))
        if hasattr(module, "routing"):
            module.register_forward_pre_hook(
                lambda m, inputs, named: padding.append(named.get("padding_mask", inputs[-1])),
                with_kwargs=True,
            )
    losses, _ = forward(batch_of(micro), chunk)
    seen = [*masks]
    masked = chunk(
        micro.input_ids,
        micro.position_ids,
        micro.attention_mask,
        labels=micro.labels,
        visual=micro.visual,
    )
    valid = micro.attention_mask == 1
    return losses.detach()[valid], masked.detach()[valid], seen, padding


def test_padding_that_follows_is_masked_for_the_router_alone(moe: Path) -> None:
    """A mask would take S x S memory in attention, and its kernel would not treat it as causal."""
    ((losses, expected, masks, padding),) = run_layout(_losses, 1, moe)
    torch.testing.assert_close(losses, expected)
    assert len(masks) == 4
    assert masks == [None] * 4
    assert len(padding) == 8
    assert all(mask.any() for mask in padding)
