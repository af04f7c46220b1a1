"""The Hugging Face vision tower as part of a Megatron model.

The tower is HF's own module with HF's parameter names. We add three things: the ranks of a TP x CP
group share the encoding instead of repeating it, a micro-batch without images still reaches every
parameter, and the forward pass takes no host sync.

Gradients. Each rank encodes some frames, and all ranks gather all features. The gather's backward
sums the gradients of the ranks' copies of the features over the group:

* CP: ranks consume different rows, so the sum over CP is the whole gradient. The parameter
  gradients of the ranks' frames are then parts, which Megatron's DDP adds up over DP x CP.
* TP with SP: the same, but Megatron adds parts up over TP only for parameters that are marked
  ``sequence_parallel``, as its norms are. So we mark the tower's.
* TP without SP: ranks consume the same rows, so the sum over TP is TP times the gradient. We mark
  the parameters ``average_gradients_across_tp_domain``: the mean over TP both adds the parts up and
  removes the factor TP.

The marks are right without sharing too. Under SP each rank's parameter gradient is then a part
(of the rows it consumed). Without SP it is the whole gradient, which a mean over TP does not
change. See ``megatron.core.distributed.finalize_model_grads``.
"""

from __future__ import annotations

import heapq
import inspect
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionModel,
    Qwen3VLVisionRotaryEmbedding,
)

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.inputs import PER_PATCH, VisualInputs, interpolation_arguments, to_device
from mcore_qwen3vl.model.vision_block import Linear, adapt_block
from mcore_qwen3vl.model.weight_gradient import accumulate_weight_gradient

label_module(__file__, "vision tower")


class VisionTower(Qwen3VLVisionModel):
    """HF ``Qwen3VLVisionModel`` (``Qwen3VLMoeVisionModel`` is the same network) on Megatron ranks.

    Args:
        config: Megatron's config; only `sequence_parallel`, `params_dtype` and
            `use_cpu_initialization` are read.
        group: the TP x CP process group, over whose ranks the frames are divided; None for a
            single rank.
        recompute: whether to keep only each block's input, and recompute the block in the backward
            pass. If not, only cheap outputs are recomputed, see :func:`.adapt_block`.
        fused_rotary: whether to rotate queries and keys with Transformer Engine's kernel.
    """

    def __init__(
        self,
        architecture: Architecture,
        config: TransformerConfig,
        *,
        group: torch.distributed.ProcessGroup | None = None,
        recompute: bool = False,
        fused_rotary: bool = False,
    ) -> None:
        super().__init__(Qwen3VLVisionConfig(**asdict(architecture.vision)))
        self.patch_embed.proj = _PatchProjection(self.get_submodule("patch_embed.proj"))
        self.rotary_pos_emb = RotaryEmbedding(self.config)
        self.to(config.params_dtype)
        if not config.use_cpu_initialization and self.device.type != "meta":
            self.to(torch.cuda.current_device())
        shares = group is not None and group.size() > 1
        self.sharing_group = group if shares else None  # None: this rank encodes all frames
        sum_over_tp, mean_over_tp = "sequence_parallel", "average_gradients_across_tp_domain"
        for parameter in self.parameters():
            setattr(parameter, sum_over_tp if config.sequence_parallel else mean_over_tp, True)
        for module in self.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
            if config.gradient_accumulation_fusion and isinstance(module, nn.Linear):
                accumulate_weight_gradient(module.weight)
        for block in self.blocks:
            adapt_block(block, lean=not recompute, fused_rotary=fused_rotary)
            if recompute:
                block.gradient_checkpointing = True
                block._gradient_checkpointing_func = partial(
                    checkpoint, use_reentrant=False, preserve_rng_state=False
                )

    def forward(self, visual: VisualInputs | None) -> tuple[Tensor, list[Tensor]]:
        """Encode one micro-batch; every rank of the group calls this with the same `visual`.

        Args:
            visual: the images and videos; None for a text-only micro-batch. That one encodes a
                dummy feature that is never selected, so that each parameter has a gradient,
                exactly zero, and no gradient reduction waits for a missing one.

        Returns:
            The features (N, H), and the features (N, H) of each DeepStack layer. They are complete
            on every rank, in the order of ``visual.token_index``.
        """
        frames = torch.empty(0, dtype=torch.int64) if visual is None else visual.frame_patches
        group = self.sharing_group
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        share = share_frames(frames, self.spatial_merge_unit, ranks, rank)
        stacked = self._encode(visual, share)  # (n, 1 + layers, H)
        if group is not None:
            padding = (0, 0, 0, 0, 0, share.padded_features - len(stacked))
            padded = F.pad(stacked, padding)
            # (ranks * padded, 1 + layers, H)
            stacked = gather_from_sequence_parallel_region(padded, group=group)
        if group is not None or visual is None:
            stacked = stacked.index_select(0, to_device(share.order, stacked.device))
        features, *deepstack = stacked.unbind(1)
        return features, deepstack

    def _encode(self, visual: VisualInputs | None, share: Share) -> Tensor:
        """Encode this rank's frames, or a dummy feature, by HF's forward: (n, 1 + layers, H)."""
        if visual is None or not share.frame_patches:
            frame_patches: tuple[int, ...] = (self.spatial_merge_unit,)
            patches = self._dummy_patches()
        else:
            frame_patches = share.frame_patches
            patches = self._own_patches(visual, share)
        boundaries = F.pad(torch.tensor(frame_patches).cumsum(0), (1, 0)).int()  # (F + 1,)
        output = super().forward(
            patches["pixel_values"],
            grid_thw=None,  # HF would only derive the arguments below from it
            cu_seqlens=to_device(boundaries, self.device),
            max_seqlen=max(frame_patches),
            position_ids=patches["rotary_position_ids"],
            **interpolation_arguments(
                patches["interpolation_indices"], patches["interpolation_weights"]
            ),
            frame_patches=frame_patches,
            return_dict=True,
        )
        return torch.stack([output.pooler_output, *output.deepstack_features], dim=1)

    def _own_patches(self, visual: VisualInputs, share: Share) -> dict[str, Tensor]:
        """Return this rank's rows of the tensors with a patch axis, on the tower's device."""
        patches = {name: getattr(visual, name) for name in PER_PATCH}
        if self.sharing_group is not None:
            rows = to_device(share.patch_rows, visual.pixel_values.device)
            patches = {name: tensor.index_select(0, rows) for name, tensor in patches.items()}
        patches = {name: to_device(tensor, self.device) for name, tensor in patches.items()}
        if visual.pixel_scale is not None:
            patches["pixel_values"] = visual.pixel_scale.apply(patches["pixel_values"])
        return patches

    def _dummy_patches(self) -> dict[str, Tensor]:
        """Return black patches for one feature, all at the origin."""
        n, integers = self.spatial_merge_unit, {"dtype": torch.int64, "device": self.device}
        width = self.patch_embed.proj.weight[0].numel()
        return {
            "pixel_values": torch.zeros(n, width, device=self.device),
            "rotary_position_ids": torch.zeros(n, 2, **integers),
            "interpolation_indices": torch.zeros(n, 4, **integers),
            "interpolation_weights": torch.zeros(n, 4, device=self.device),
        }


class _PatchProjection(nn.Module):
    """A convolution with a stride equal to its kernel, as a matrix product, which is much faster.

    It is a module of its own, because Megatron's overlapped parameter gather waits for a weight
    when the module that owns it is called. Reading the weight without calling the module would give
    the value from before the optimizer's step.
    """

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, patches: Tensor) -> Tensor:
        """Project patches: (P, channels, frames, height, width) -> (P, hidden)."""
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class RotaryEmbedding(Qwen3VLVisionRotaryEmbedding):
    """HF's, with frequencies that stay float32 when Megatron casts the model to half precision."""

    inv_freq: Tensor

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        # Until transformers 5.16 it was constructed from a width.
        takes_config = "config" in inspect.signature(Qwen3VLVisionRotaryEmbedding).parameters
        width = config.hidden_size // config.num_heads // 2
        self._argument: Any = config if takes_config else width
        super().__init__(self._argument)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        """Do what torch does for ``to()``, ``half()`` and so on; restore exact frequencies."""
        super()._apply(fn, recurse)
        with torch.device("cpu"):  # the current ones may be rounded, or on the meta device
            exact = Qwen3VLVisionRotaryEmbedding(self._argument).inv_freq
        self.inv_freq = nn.Buffer(exact.to(self.inv_freq.device), persistent=False)
        return self


@dataclass(frozen=True)
class Share:
    """One rank's frames, and the order of the gathered features. All on the host.

    The unit of sharing is the frame, because attention never leaves one. So a video can be divided
    between its frames, and a frame's features do not depend on which rank encodes it.
    """

    frame_patches: tuple[int, ...]  # patches of each frame this rank encodes; empty: none
    patch_rows: Tensor  # (P_local,) int64: rows of the (P, ...) inputs
    padded_features: int  # rows that every rank contributes to the gather; at least 1
    order: Tensor  # (N,) int64: row of the (ranks * padded_features, ...) gather for each feature


def assign_frames(frame_patches: np.ndarray, ranks: int) -> np.ndarray:
    """Assign each frame to a rank: the largest first, to the rank with the least work so far.

    Ranks are (F,), like the numbers of patches, and equal on every rank. The largest load is at
    most 4/3 of the optimum (Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """
    owners = np.zeros(len(frame_patches), dtype=np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    for frame in np.argsort(-frame_patches, kind="stable"):
        load, rank = loads[0]
        owners[frame] = rank
        heapq.heapreplace(loads, (load + int(frame_patches[frame]), rank))
    return owners


def share_frames(frame_patches: Tensor, merge_unit: int, ranks: int, rank: int) -> Share:
    """Divide F frames among `ranks` and describe the part of `rank`.

    `frame_patches` are (F,) int64 on the CPU; F may be 0. `merge_unit` patches merge into one
    feature.
    """
    patches = frame_patches.numpy()
    owners = assign_frames(patches, ranks)
    of_feature = np.repeat(owners, patches // merge_unit)  # (N,) the rank that computes it
    counts = np.bincount(of_feature, minlength=ranks)
    padded = max(int(counts.max()), 1)  # a rank without a frame contributes one dummy feature
    # Each rank keeps its frames in their original order; the gather puts them rank by rank.
    order = np.empty_like(of_feature)
    order[np.argsort(of_feature, kind="stable")] = np.concatenate(
        [number * padded + np.arange(count) for number, count in enumerate(counts)]
    )
    return Share(
        frame_patches=tuple(patches[owners == rank].tolist()),
        patch_rows=torch.from_numpy(np.flatnonzero(np.repeat(owners, patches) == rank)),
        padded_features=padded,
        order=torch.from_numpy(order),
    )
