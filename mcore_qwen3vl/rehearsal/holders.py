"""The names by which a rehearsal counts: parts of its work, and holders of device memory."""

from __future__ import annotations

from functools import cache

from mcore_qwen3vl.simulated_gpu.rank import Frames

FORWARD, BACKWARD = "forward", "backward"
"""The two parts of a micro-batch's work."""
DISPATCH, COMBINE = "dispatch", "combine"
"""What DeepEP does with tokens for the experts of a group: send each once, and add up results."""

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
FROZEN = "weights, second model"
BUFFERS = "buffers"
BATCH = "batch"
LOGITS = "logits and loss"
DELTA_NETS = "gated delta nets"
TEMPORARY = "backward, temporary"

# Part of PATH:FUNCTION, holder: the first part that the innermost function outside PyTorch has.
_HOLDERS = (
    ("megatron/core/optimizer/", f"{OPTIMIZER}, temporary"),
    ("mcore_qwen3vl/training/optimizer", f"{OPTIMIZER}, temporary"),
    ("megatron/core/distributed/", GRADIENTS),
    ("tensor_parallel/cross_entropy", LOGITS),
    ("fused_cross_entropy", LOGITS),
    ("mcore_qwen3vl/training/forward_step", LOGITS),
    ("mcore_qwen3vl/model/head", LOGITS),
    ("models/gpt/gpt_model", LOGITS),
    ("language_module", LOGITS),
    ("mcore_qwen3vl/model/vision", "vision tower"),
    ("transformers/models/qwen3_vl", "vision tower"),
    ("transformer/moe/", "experts and router"),
    ("mcore_qwen3vl/model/decoder/experts", "experts and router"),
    ("transformer/mlp.py", "MLP"),
    ("fusions/fused_bias_swiglu", "MLP"),
    ("mcore_qwen3vl/model/decoder/mlp", "MLP"),
    ("mcore_qwen3vl/model/decoder/norm", "norms"),
    ("transformer/torch_norm", "norms"),
    ("mcore_qwen3vl/model/decoder/attention", "attention"),
    ("transformer/attention", "attention"),
    ("mcore_qwen3vl/model/decoder/delta_", DELTA_NETS),
    ("core/ssm/gated_delta_net", DELTA_NETS),
    ("models/common/embeddings/rotary", "attention"),
    ("models/common/embeddings/language", "embedding"),
    ("mcore_qwen3vl/model/qwen3vl.py:fuse", "embedding"),
    ("mcore_qwen3vl/model/qwen3vl.py:select", "embedding"),
    ("mcore_qwen3vl/model/decoder/layer.py:add_to_rows", "embedding"),
    ("transformer/transformer_layer", "residual stream"),
    ("fusions/fused_bias_dropout", "residual stream"),
    ("mcore_qwen3vl/model/decoder/layer", "residual stream"),
    ("mcore_qwen3vl/training/data_provider", BATCH),
    ("mcore_qwen3vl/model/inputs", BATCH),
    ("pipeline_parallel/", "pipeline transfers"),
    ("core/utils.py", BUFFERS),
    ("megatron/training/", "Megatron's loop"),
    ("mcore_qwen3vl/", "model, other"),
)
# Files that allocate for their callers: the next caller's file counts instead.
_TRANSPARENT = (
    "mcore_qwen3vl/simulated_gpu/",
    "mcore_qwen3vl/rehearsal/",
    "tensor_parallel/layers",
    "tensor_parallel/mappings",
    "tensor_parallel/random",
    "mcore_qwen3vl/model/recompute",
    "mcore_qwen3vl/model/kernels",
)


def holder_of(frames: Frames) -> str:
    """Return the holder of an allocation without a known owner, by its frames, innermost first."""
    for frame in frames:
        holder = _holder_of_function(frame["filename"], frame["name"])
        if holder is not None:
            return holder
    return TEMPORARY


@cache
def _holder_of_function(file: str, function: str) -> str | None:
    """Return the holder that a function stands for; None if its caller counts instead."""
    if any(part in file for part in _TRANSPARENT):
        return None
    place = f"{file}:{function}"
    return next((holder for part, holder in _HOLDERS if part in place), None)
