"""The names by which a rehearsal counts: parts of its work, and holders of device memory.

A holder is what lasts (weights, gradients and so on), known by its storage, or else the label of
the innermost line outside PyTorch that allocates. Our own code declares its labels itself, see
``mcore_qwen3vl.memory_labels``; those of libraries are here, by module.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, get_args

import mcore_qwen3vl
from mcore_qwen3vl import simulated_gpu
from mcore_qwen3vl.memory_labels import MemoryLabel, label_at
from mcore_qwen3vl.simulated_gpu.rank import Frames

FORWARD, BACKWARD = "forward", "backward"
"""The two parts of a micro-batch's work."""

DISPATCH, COMBINE = "dispatch", "combine"
"""What DeepEP does with tokens for the experts of a group: send each once, and add up results."""

OtherHolder = Literal[
    "backward, temporary",
    "buffers",
    "gradients",
    "Megatron's loop",
    "optimizer",
    "pipeline transfers",
    "weights",
    "weights, second model",
]
"""What holds memory and is no label of our own code."""
Holder = MemoryLabel | OtherHolder
HOLDERS = (*get_args(MemoryLabel), *get_args(OtherHolder))

WEIGHTS: Holder = "weights"
GRADIENTS: Holder = "gradients"
OPTIMIZER: Holder = "optimizer"
FROZEN: Holder = "weights, second model"
BUFFERS: Holder = "buffers"
LOGITS: Holder = "logits and loss"
TEMPORARY: Holder = "backward, temporary"

OF_LIBRARIES: dict[str, Holder] = {
    "megatron.core.optimizer": "optimizer, temporary",
    "megatron.core.distributed": GRADIENTS,
    "megatron.core.tensor_parallel.cross_entropy": LOGITS,
    "megatron.core.fusions.fused_cross_entropy": LOGITS,
    "megatron.core.models.gpt.gpt_model": LOGITS,
    "megatron.core.models.common.language_module": LOGITS,
    "transformers.models.qwen3_vl": "vision tower",
    "transformers.models.qwen3_vl_moe": "vision tower",
    "megatron.core.transformer.moe": "experts and router",
    "megatron.core.transformer.mlp": "MLP",
    "megatron.core.fusions.fused_bias_swiglu": "MLP",
    "megatron.core.transformer.torch_norm": "norms",
    "megatron.core.transformer.attention": "attention",
    "megatron.core.models.common.embeddings.rotary_pos_embedding": "attention",
    "megatron.core.ssm.gated_delta_net": "gated delta nets",
    "megatron.core.models.common.embeddings.language_model_embedding": "embedding",
    "megatron.core.transformer.transformer_layer": "residual stream",
    "megatron.core.fusions.fused_bias_dropout": "residual stream",
    "megatron.core.pipeline_parallel": "pipeline transfers",
    "megatron.core.utils": BUFFERS,
    "megatron.training": "Megatron's loop",
}
"""The holder of what a module or package of a library allocates; a module that is not here
allocates for its callers."""

_OURS, _SIMULATED = (
    f"{Path(str(package.__file__)).parent}/" for package in (mcore_qwen3vl, simulated_gpu)
)


def holder_of(frames: Frames) -> Holder:
    """Return the holder of an allocation without a known owner, by its frames, innermost first."""
    for frame in frames:
        file = frame["filename"]
        if file.startswith(_SIMULATED):
            continue
        ours = file.startswith(_OURS)
        holder = label_at(file, frame["line"]) if ours else _holder_of_library(file)
        if holder is not None:
            return holder
    return TEMPORARY


@cache
def _holder_of_library(file: str) -> Holder | None:
    """Return what a library's file allocates; None if it does so for its callers."""
    for module, holder in OF_LIBRARIES.items():
        path = f"/{module.replace('.', '/')}"
        if f"{path}/" in file or file.endswith(f"{path}.py"):
            return holder
    return None
