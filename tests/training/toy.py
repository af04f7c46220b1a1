"""A batch made by hand."""

from __future__ import annotations

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.batch import Batch, Counts
from mcore_qwen3vl.model.inputs import visual_inputs


def batch(architecture: Architecture, image: bool) -> Batch:
    """Make a pack of two samples, 5 and 8 tokens padded to 16, with 16 image patches or none."""
    ids = torch.arange(16)[None].clone()
    visual = None
    if image:
        ids[0, 1:5] = architecture.image_token_id
        pixels = torch.randn(16, architecture.vision.patch_dim)
        visual = visual_inputs(architecture, ids, pixels, torch.tensor([[1, 4, 4]]))
    return Batch(
        input_ids=ids, labels=ids, loss_weights=torch.ones(1, 16),
        position_ids=torch.zeros(3, 1, 16, dtype=torch.int64),
        padding_mask=torch.zeros(1, 16, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 5, 13, 16], dtype=torch.int32), max_seqlen=8, visual=visual,
        counts=Counts(samples=2, tokens=13, capacity=16, trained_tokens=6, images=int(image),
                      patches=16 * image, skipped=1),
        names=("a", "b"),
    )  # fmt: skip
