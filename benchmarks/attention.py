"""Attention kernels in half precision against float32 on the host, forward and backward.

    python benchmarks/attention.py            # on a GPU; --device cpu tries the comparison itself
    python benchmarks/attention.py --experts  # the experts' grouped matmuls instead

Parity of tiny models in float32 never calls the variable-length kernel, which needs half precision.
This compares the head sizes of all models, grouped queries, context-parallel ranks with fewer
queries than keys, and a video of five hundred tiny frames. It prints the worst errors as JSON,
relative to the largest value. The exit code is 1 if one is above the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

LIMIT = 2**-4
"""On the host, rounding explains errors up to 0.025: probabilities, outputs and the gradients that
are summed for a key (up to sixteen) are rounded to 8 bits. One key too many gives 0.11 or more."""
EXPERTS_LIMIT = 2**-7
Attend = Callable[..., Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the kernels, print the errors and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--experts", action="store_true")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    torch.manual_seed(0)
    if options.experts:
        errors_by_name, limit = experts(device), EXPERTS_LIMIT
    else:
        errors_by_name, limit = {**dict(decoder(device)), **dict(vision(device))}, LIMIT
    print(json.dumps(errors_by_name))
    return int(not all(error <= limit for error in errors_by_name.values()))


def experts(device: torch.device) -> dict[str, float]:
    """Compare the grouped product of uneven experts, one of which has no row."""
    from mcore_qwen3vl.model.decoder.experts import Groups, grouped_product

    counts = [37, 0, 129, 5]

    def ours(rows: Tensor, matrices: Tensor) -> Tensor:
        return grouped_product(rows, matrices, Groups.of(counts, rows.device))

    def each(rows: Tensor, matrices: Tensor) -> Tensor:
        pairs = zip(rows.split(counts), matrices, strict=True)
        return torch.cat([run @ matrix.T for run, matrix in pairs])

    shapes = [(sum(counts), 768), (len(counts), 512, 768)]
    differences = errors(ours, each, shapes, (sum(counts), 512), device)
    return dict(zip(("output", "gradient of rows", "of matrices"), differences, strict=True))


def decoder(device: torch.device) -> Iterator[tuple[str, float]]:
    """Compare causal attention of packs, whole and divided over CP ranks."""
    from mcore_qwen3vl.model.decoder.attention import causal_segments

    attention = _attention()
    bounds = (0, 128, 132, 516, 584)
    for size, heads, groups in ((128, 16, 8), (128, 32, 8), (128, 64, 4), (64, 8, 8)):
        for cp, rank in ((1, 0), (2, 0), (2, 1)):
            on_device = causal_segments(bounds, cp, rank, device)
            on_host = causal_segments(bounds, cp, rank, torch.device("cpu"))
            shapes = [(sum(on_host.query_lengths), heads, size)]
            shapes += [(sum(on_host.key_lengths), groups, size)] * 2

            def segmented(*qkv: Tensor, segments: Any = on_host) -> Tensor:
                return attention._segmented(*(x[:, None] for x in qkv), segments, None)[:, 0]

            def kernel(*qkv: Tensor, segments: Any = on_device) -> Tensor:
                return attention._varlen(*qkv, segments)

            ours = kernel if device.type == "cuda" else segmented
            name = f"decoder {heads} x {size} over {groups}, CP {cp} rank {rank}"
            yield name, worst(ours, segmented, shapes, device)


def vision(device: torch.device) -> Iterator[tuple[str, float]]:
    """Compare full attention within each frame."""
    from mcore_qwen3vl.model.vision import attend

    for size in (64, 72):
        for what, frames in (("500 frames of 4", (4,) * 500), ("uneven frames", (16, 4, 1024, 64))):
            bounds = torch.tensor([0, *frames]).cumsum(0).int()

            def ours(*qkv: Tensor, bounds: Tensor = bounds, frames: Any = frames) -> Tensor:
                return attend(*qkv, bounds.to(qkv[0].device), frames)

            shape = (sum(frames), 16, size)
            yield f"vision 16 x {size}, {what}", worst(ours, ours, [shape] * 3, device)


def worst(
    ours: Attend, reference: Attend, shapes: list[tuple[int, ...]], device: torch.device
) -> float:
    """Return the largest error of output and gradients."""
    differences = errors(ours, reference, shapes, shapes[0], device)
    return max(differences) if all(error == error for error in differences) else float("inf")


def errors(
    ours: Attend,
    reference: Attend,
    shapes: list[tuple[int, ...]],
    output: tuple[int, ...],
    device: torch.device,
) -> list[float]:
    """Return the errors of output and gradients, each relative to its largest value."""
    values = [torch.randn(shape).bfloat16() for shape in shapes]
    gradient = torch.randn(output).bfloat16()
    got = _run(ours, values, gradient, device, torch.bfloat16)
    expected = _run(reference, values, gradient, torch.device("cpu"), torch.float32)
    pairs = zip(got, expected, strict=True)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def _run(
    attend: Attend, values: list[Tensor], gradient: Tensor, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    inputs = [value.detach().to(device, dtype).requires_grad_() for value in values]
    output = attend(*inputs)
    output.backward(gradient.to(device, dtype))
    return [x.detach().float().cpu() for x in (output, *(x.grad for x in inputs))]


def _attention() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mcore_qwen3vl.model.decoder.attention import TorchAttention

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
    groups: Any = SimpleNamespace(cp=None)  # nothing is gathered here
    return TorchAttention(config, pg_collection=groups)


if __name__ == "__main__":
    sys.exit(main())
