"""The interface of Hugging Face's vision tower, which changed twice since transformers 5.9.

We detect each difference from the interface itself, so that the rest of the package sees one form.

* Positions in the learned grid: until 5.14 (4, P) ``bilinear_indices`` and ``bilinear_weights``,
  then (P, 4) ``interp_indices`` and ``interp_weights``.
* The rotary embedding: until 5.16 constructed from a width, then from the config.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import vision_utils
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionRotaryEmbedding

from mcore_qwen3vl.config import VisionArchitecture

_interpolation = getattr(vision_utils, "get_vision_interpolation_indices_and_weights", None)
_rotary_takes_config = "config" in inspect.signature(Qwen3VLVisionRotaryEmbedding).parameters


def interpolation(grid_thw: Tensor, vision: VisionArchitecture) -> tuple[Tensor, Tensor]:
    """Return the place of each of P patches in the square grid of learned positions.

    Args:
        grid_thw: (images + videos, 3) int64, host.

    Returns:
        The four corners (P, 4) int64, and their bilinear weights (P, 4) float32.
    """
    side, merge = int(vision.num_position_embeddings**0.5), vision.spatial_merge_size
    if _interpolation is None:
        indices, weights = vision_utils.get_vision_bilinear_indices_and_weights(
            grid_thw, num_grid_per_side=side, spatial_merge_size=merge
        )
        return indices.t().long(), weights.t()
    return _interpolation(
        grid_thw,
        num_grid_per_side=side,
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=merge,
    )


def interpolation_arguments(indices: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Convert the results of :func:`interpolation` to arguments of the tower's forward."""
    if _interpolation is None:
        return {"bilinear_indices": indices.t(), "bilinear_weights": weights.t()}
    return {"interp_indices": indices, "interp_weights": weights}


class RotaryEmbedding(Qwen3VLVisionRotaryEmbedding):
    """HF's, with frequencies that stay float32 when Megatron casts the model to half precision."""

    inv_freq: Tensor

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        width = config.hidden_size // config.num_heads // 2
        argument: Any = config if _rotary_takes_config else width
        super().__init__(argument)
        self._argument = argument

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        with torch.device("cpu"):  # the current ones may be rounded, or on the meta device
            exact = Qwen3VLVisionRotaryEmbedding(self._argument).inv_freq
        self.inv_freq = nn.Buffer(exact.to(self.inv_freq.device), persistent=False)
        return self
