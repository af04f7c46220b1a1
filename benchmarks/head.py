"""The head's loss, forward and backward: a chunk of logits at a time, against all at once.

The figure of each path is its memory beyond its inputs and the gradients that every path needs. On
the CPU each path runs in a process of its own. Times are ratios within this run.

    python benchmarks/head.py --tokens 2048 --width 512            # on the CPU
    python -m mcore_qwen3vl.pretended benchmarks/head.py --device cuda   # only bytes
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mcore_qwen3vl.standalone import init_distributed

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From hidden states (s, 1, H), weight (V, H) and targets (1, s) to losses (1, s)."""


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from mcore_qwen3vl.model.head.log_probs import Columns, token_log_probs

    log_probs, _ = token_log_probs(hidden, weight, targets, Columns(0, len(weight)))
    return -log_probs


def scored(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute what `mcore-qwen3vl score --entropy` computes, without a backward pass."""
    from mcore_qwen3vl.model.head.log_probs import Columns, token_log_probs

    with torch.no_grad():
        log_probs, _ = token_log_probs(
            hidden, weight, targets, Columns(0, len(weight)), entropy=True
        )
    return log_probs.requires_grad_()


def megatron(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = hidden @ weight.t()
    return vocab_parallel_cross_entropy(logits.float(), targets.t()).t()


def megatron_fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = parallel_state.get_tensor_model_parallel_group()
    return fused_vocab_parallel_cross_entropy(hidden @ weight.t(), targets.t(), group).t()


PATHS: dict[str, Loss] = {
    "chunked": chunked,
    "Megatron's": megatron,
    "Megatron's, fused": megatron_fused,
    "chunked, scores alone": scored,
}


def measure(name: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the bytes taken at the peak, and the seconds."""
    device = torch.device(options.device)
    if not torch.distributed.is_initialized():
        init_distributed(device=options.device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(options.tokens, 1, options.width, device=device, dtype=dtype)
    weight = torch.randn(options.vocabulary, options.width, device=device, dtype=dtype)
    for tensor in (hidden, weight):
        tensor.requires_grad_().grad = torch.zeros_like(tensor)
    targets = torch.arange(options.tokens, device=device)[None] % options.vocabulary
    before = taken(device)
    start = time.perf_counter()
    PATHS[name](hidden, weight, targets).sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return taken(device) - before, time.perf_counter() - start


def taken(device: torch.device) -> float:
    """Return peak bytes: on the device since the last call, on the CPU since the process began."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def apart(name: str, options: argparse.Namespace) -> tuple[float, float]:
    """Run :func:`measure` in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, (name, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    print(f"{options.tokens} tokens, vocabulary {options.vocabulary}, width {options.width}")
    print(f"{'loss':22} {'GB':>8} {'ratio':>6} {'time':>6}")
    first: tuple[float, float] | None = None
    for name in PATHS:
        size, seconds = (apart if options.device == "cpu" else measure)(name, options)
        first = first or (size, seconds)
        print(f"{name:22} {size / 1e9:8.2f} {size / first[0]:6.1f} {seconds / first[1]:6.2f}")


if __name__ == "__main__":
    main()
