"""Kernels in half precision against float32, forward and backward, and their rates.

    python benchmarks/kernels.py            # attention; --device cpu tries the comparison itself
    python benchmarks/kernels.py --flash-attention-3  # the same by the package flash_attn_3
    python benchmarks/kernels.py --experts  # the experts' grouped matmuls instead
    python benchmarks/kernels.py --delta-net  # flash-linear-attention's kernels instead
    python benchmarks/kernels.py --rates FILE --gpu h100-80gb  # what the model of time assumes

Parity of tiny models in float32 never calls the variable-length kernel, which needs half precision.
This compares the head sizes of all models, grouped queries, context-parallel ranks with fewer
queries than keys, and a video of five hundred tiny frames. It prints the worst errors as JSON,
relative to the largest value. The exit code is 1 if one is above the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.train_step import time_step
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.flash_attention import use_flash_attention_3
from mcore_qwen3vl.runtime.gpus import GPUS
from mcore_qwen3vl.simulated_gpu.device import is_preloaded

LIMIT = 2**-4
"""On the host, rounding explains errors up to 0.025: probabilities, outputs and the gradients that
are summed for a key (up to sixteen) are rounded to 8 bits. One key too many gives 0.11 or more."""
EXPERTS_LIMIT = 2**-7
RATE_LIMIT = 0.02
"""Of errors in bf16, as a share of float32's norm. On the H100 they were 0.003."""
Attend = Callable[..., Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the kernels, print the errors and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--flash-attention-3", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--delta-net", action="store_true")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="write rates of --gpu to FILE")
    parser.add_argument("--gpu", choices=GPUS)
    options = parser.parse_args(argv)
    if options.rates:
        kind = options.gpu or parser.error("--rates needs --gpu")
        return measure_rates(options.rates, kind, options.device)
    device = torch.device(options.device)
    torch.manual_seed(0)
    if options.flash_attention_3:
        use_flash_attention_3()
    if options.experts:
        errors_by_name, limit = compare_experts(device), EXPERTS_LIMIT
    elif options.delta_net:
        errors_by_name, limit = dict(compare_delta_net(device)), LIMIT
    else:
        errors_by_name, limit = (
            {**dict(compare_decoder(device)), **dict(compare_vision(device))},
            LIMIT,
        )
    print(json.dumps(errors_by_name))
    return int(not all(error <= limit for error in errors_by_name.values()))


def compare_experts(device: torch.device) -> dict[str, float]:
    """Compare the grouped product of uneven experts, one of which has no row."""
    from mcore_qwen3vl.model.decoder.experts import Groups, grouped_product

    counts = [37, 0, 129, 5]

    def ours(rows: Tensor, matrices: Tensor) -> Tensor:
        return grouped_product(rows, matrices, Groups.from_counts(counts, rows.device))

    def one_by_one(rows: Tensor, matrices: Tensor) -> Tensor:
        pairs = zip(rows.split(counts), matrices, strict=True)
        return torch.cat([run @ matrix.T for run, matrix in pairs])

    shapes = [(sum(counts), 768), (len(counts), 512, 768)]
    differences = relative_errors(ours, one_by_one, shapes, (sum(counts), 512), device)
    return dict(zip(("output", "gradient of rows", "of matrices"), differences, strict=True))


def compare_delta_net(device: torch.device) -> Iterator[tuple[str, float]]:
    """Compare the convolution and the delta rule of one sample, and of packed ones.

    On the host, the plain functions in half precision take the place of the kernels.
    """
    from mcore_qwen3vl.model.decoder import delta_net as nets
    from mcore_qwen3vl.model.decoder.attention import PackedSequence

    def convolution(run: Any, samples: Any, x: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = run(x, weight, samples, None)
        return output

    def rule(run: Any, samples: Any, *inputs: Tensor) -> Tensor:
        query, key, value, decay, beta = inputs
        log_decay = -F.softplus(decay.float())
        output: Tensor = run(query, key, value, log_decay, beta.sigmoid(), samples, None)[0]
        return output

    plain_convolve, plain_rule = nets._PLAIN
    convolve, apply_rule = nets._KERNELS if device.type == "cuda" else nets._PLAIN
    widths = (512,), (2, 128), (4, 128), (4,)  # of channels, keys, values, and decay and beta
    for what, bounds in (("one sample", (0, 584)), ("packed", (0, 128, 132, 516, 584))):
        length = bounds[-1]
        samples: Any = bounds
        if device.type == "cuda":
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
            packed = PackedSequence(
                qkv_format="thd", bounds=bounds, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens
            )
            samples = packed if len(bounds) > 2 else None

        wide, keys, values, scalars = ((1, length, *of_token) for of_token in widths)
        for name, function, run, plain, inputs, output in (
            ("convolution", convolution, convolve, plain_convolve, [wide, (512, 4)], wide),
            ("delta rule", rule, apply_rule, plain_rule,
             [keys, keys, values, scalars, scalars], values),
        ):  # fmt: skip
            ours, reference = partial(function, run, samples), partial(function, plain, bounds)
            yield (
                f"{name}, {what}",
                largest_error(relative_errors(ours, reference, inputs, output, device)),
            )


def compare_decoder(device: torch.device) -> Iterator[tuple[str, float]]:
    """Compare causal attention of packs, whole and divided over CP ranks."""
    from mcore_qwen3vl.model.decoder.attention import causal_segments

    attention = _make_attention()
    bounds = (0, 128, 132, 516, 584)
    for size, heads, groups in ((128, 16, 8), (128, 32, 8), (128, 64, 4), (64, 8, 8)):
        for cp, rank in ((1, 0), (2, 0), (2, 1)):
            on_device = causal_segments(bounds, cp, rank, device)
            on_host = causal_segments(bounds, cp, rank, torch.device("cpu"))
            shapes = [(sum(on_host.query_lengths), heads, size)]
            shapes += [(sum(on_host.key_lengths), groups, size)] * 2

            # Defaults bind the values of this round.
            def segmented(*qkv: Tensor, segments: Any = on_host) -> Tensor:
                rows = (x[:, None] for x in qkv)
                return attention._attend_by_segment(*rows, segments, None)[:, 0]

            def kernel(*qkv: Tensor, segments: Any = on_device) -> Tensor:
                return attention._attend_in_one_kernel(*qkv, segments)

            ours = kernel if device.type == "cuda" else segmented
            name = f"decoder {heads} x {size} over {groups}, CP {cp} rank {rank}"
            yield name, largest_error(relative_errors(ours, segmented, shapes, shapes[0], device))


def compare_vision(device: torch.device) -> Iterator[tuple[str, float]]:
    """Compare full attention within each frame."""
    from mcore_qwen3vl.model.vision_block import attend

    for size in (64, 72):
        for what, frames in (("500 frames of 4", (4,) * 500), ("uneven frames", (16, 4, 1024, 64))):
            bounds = torch.tensor([0, *frames]).cumsum(0).int()

            def ours(*qkv: Tensor, bounds: Tensor = bounds, frames: Any = frames) -> Tensor:
                return attend(*qkv, bounds.to(qkv[0].device), frames)

            shape = (sum(frames), 16, size)
            found = relative_errors(ours, ours, [shape] * 3, shape, device)
            yield f"vision 16 x {size}, {what}", largest_error(found)


def largest_error(found: Iterable[float]) -> float:
    """Return the largest error; infinity if one is no number, which ``max`` might pass over."""
    return max(math.inf if math.isnan(error) else error for error in found)


def relative_errors(
    ours: Attend,
    reference: Attend,
    shapes: list[tuple[int, ...]],
    output: tuple[int, ...],
    device: torch.device,
) -> list[float]:
    """Return the errors of output and gradients, each relative to its largest value."""
    values = [torch.randn(shape).bfloat16() for shape in shapes]
    gradient = torch.randn(output).bfloat16()
    got = _run_with_gradients(ours, values, gradient, device, torch.bfloat16)
    expected = _run_with_gradients(reference, values, gradient, torch.device("cpu"), torch.float32)
    pairs = zip(got, expected, strict=True)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def _run_with_gradients(
    attend: Attend, values: list[Tensor], gradient: Tensor, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    inputs = [value.detach().to(device, dtype).requires_grad_() for value in values]
    output = attend(*inputs)
    output.backward(gradient.to(device, dtype))
    return [x.detach().float().cpu() for x in (output, *(x.grad for x in inputs))]


def _make_attention() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mcore_qwen3vl.model.decoder.attention import TorchAttention

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
    groups: Any = SimpleNamespace(cp=None)  # nothing is gathered here
    return TorchAttention(config, pg_collection=groups)


def measure_rates(file: Path, kind: str, device: str) -> int:
    """Measure what the model of time takes for constants of a GPU and its host.

    The file is what ``rehearse --constants`` reads. Exit code 1: a result differs from float32's,
    or a constant is impossible; then there is no file.
    """
    from mcore_qwen3vl.rehearsal.step_time import Constants

    gpu, small = GPUS[kind], device == "cpu" or is_preloaded()
    errors: dict[str, float] = {}
    shown: dict[str, float] = {}

    def random_leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()

    def median_seconds(work: Callable[[], Any], repeats: int = 10) -> float:
        """Return the median time of `work`, and of the wait for it."""
        return median([time_step(work, device)[0] for _ in range(3 + repeats)][3:])

    def tflops(name: str, flops: float, function: Callable[..., Any], *inputs: Any) -> float:
        """Return the rate of `function` with all gradients, after a comparison with float32."""
        gradient = torch.randn_like(function(*inputs))

        def output_and_gradients(*values: Any) -> list[Tensor]:
            output = function(*values)
            gradients = torch.autograd.grad(output, values, gradient.to(output.dtype))
            return [output.detach(), *gradients]

        wide = output_and_gradients(*(value.detach().float().requires_grad_() for value in inputs))
        pairs = zip(output_and_gradients(*inputs), wide, strict=True)
        errors[name] = largest_error(float((a - b).norm() / b.norm()) for a, b in pairs)
        shown[f"{name}, TFLOP/s"] = (
            flops / median_seconds(lambda: output_and_gradients(*inputs)) / 1e12
        )
        return shown[f"{name}, TFLOP/s"] / gpu.tflops

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.manual_seed(0)
    tokens = 256 if small else 8192
    shares = []
    for k, n in ((128, 256),) if small else ((2048, 12288), (6144, 2048), (4096, 24576)):
        name = f"product of {tokens} x {k} x {n}"
        shares.append(
            tflops(name, 6 * tokens * k * n, F.linear, random_leaf(tokens, k), random_leaf(n, k))
        )
    slowness = {}  # by the mean number of a query's keys
    for length in (tokens // 16, tokens):
        inputs = (random_leaf(tokens // length, 16, length, 128) for _ in range(3))
        # Of causal attention half the pairs count; the backward pass is 2.5 times the forward one.
        flops = 3.5 * 4 * 16 * 128 * tokens * length / 2
        slowness[length / 2] = 1 / tflops(f"attention over {length}", flops, attend, *inputs)
    (few, slow), (many, fast) = slowness.items()
    per_key = max((slow - fast) / (1 / few - 1 / many), 0.0)  # 1 / rate = 1 / a + per_key / keys
    best = max(fast - per_key / many, 1e-9)
    a, b = (random_leaf(1 << 20 if small else 1 << 29).detach() for _ in range(2))
    halves = a.view(-1, 2, 64)
    plain = 2 * a.nbytes / median_seconds(lambda: b.copy_(a)) / 1e12
    strided = 1.5 * a.nbytes / median_seconds(lambda: halves[:, 0] + halves[:, 1]) / 1e12
    shown |= {"copy, TB/s": plain, "sum of halves of rows, TB/s": strided}
    x, weight, gradient = random_leaf(16, 64), random_leaf(64, 64), random_leaf(16, 64).detach()
    scalar = torch.zeros(1, device=device)

    def launch_kernels() -> None:
        for _ in range(100):
            torch.autograd.grad(F.linear(x, weight), [x, weight], gradient)

    constants = {
        "gemm": sum(shares) / len(shares),
        "attention": 1 / best,
        "attention_keys": max(per_key / best, 1.0),
        "memory": 2 / (1 / plain + 1 / strided) / gpu.memory_tb_per_s,
        "launch_us": median_seconds(launch_kernels) / 300 * 1e6,
        "wait_us": median_seconds(lambda: scalar.add_(1).item(), 100) * 1e6,
    }
    print(json.dumps({"worst error": max(errors.values()), **shown, **constants}), flush=True)
    wrong = [name for name, error in errors.items() if not error <= RATE_LIMIT]
    file.write_text(json.dumps(constants, indent=1) + "\n")
    try:
        Constants.from_file(file)
    except BadInput as error:
        wrong.append(str(error))
    if wrong:
        file.unlink()
        print(f"not as it must be: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
