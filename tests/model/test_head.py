"""Padding of the vocabulary changes no loss, and another layer is no head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.converters.live import load_hf
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.head import Head
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint

ROWS = 352
"""Rows of a tiny model's head without padding."""


def losses_and_gradients(
    checkpoint: Path, layout: Layout, rows: int, fused: bool
) -> dict[str, Tensor]:
    """Run one text sample with a head of `rows` rows; the head's gradient is this rank's part."""
    initialize(layout)
    options = {"params_dtype": torch.float32, "cross_entropy_loss_fusion": fused}
    model = Qwen3VLModel.from_hf_config(
        checkpoint, vocab_size=rows, **{**layout.config_overrides(), **options}
    )
    load_hf(model, checkpoint)
    head = model.output_layer.weight
    first = dist.get_rank() * len(head)
    with torch.no_grad():
        head[max(ROWS - first, 0) :] = 0.3  # padding rows far from 0 would show
    ids = torch.arange(24)[None] % 50
    positions = torch.arange(24).expand(3, 1, -1)
    logits = model(ids, positions).detach()
    losses = model(ids, positions, labels=ids.roll(-1, 1))
    losses.sum().backward()
    norm = model.decoder.final_layernorm.weight.grad
    assert head.grad is not None
    return {"losses": losses.detach(), "norm": norm, "head": head.grad, "logits": logits}


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("layout", ["single", "tp2"])
def test_padding_changes_neither_losses_nor_gradients(
    layout: str, fused: bool, tmp_path: Path
) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "dense")
    (exact,) = run_layout(losses_and_gradients, 1, checkpoint, Layout(), ROWS, fused)
    ranks = run_layout(
        losses_and_gradients,
        Layout.parse(layout).world_size,
        checkpoint,
        Layout.parse(layout),
        ROWS + 48,
        fused,
    )
    for rank in ranks:
        torch.testing.assert_close(rank["losses"], exact["losses"], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(rank["norm"], exact["norm"], rtol=2e-5, atol=2e-5)
    head = torch.cat([rank["head"] for rank in ranks])
    torch.testing.assert_close(head[:ROWS], exact["head"], rtol=2e-5, atol=2e-5)
    assert not head[ROWS:].any()
    logits = torch.cat([rank["logits"] for rank in ranks], -1)
    torch.testing.assert_close(logits[..., :ROWS], exact["logits"], rtol=2e-5, atol=2e-5)
    assert (logits[..., ROWS:] == -torch.inf).all()


def test_another_layer_is_refused() -> None:
    with pytest.raises(BadInput, match=r"The head is a Linear, .* drop fp8_output_proj"):
        Head.adopt(torch.nn.Linear(3, 5), vocab_size=5, chunk=None)
