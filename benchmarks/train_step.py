"""One training step in one process: ours (spec te or torch) against Hugging Face's, same batch.

    python benchmarks/train_step.py --shape 2B --seq-length 8192          # CUDA
    python benchmarks/train_step.py --shape tiny --device cpu --seq-length 256

Both sides run forward, backward and AdamW on one packed sequence of image and text samples with
random weights; tokens are the same. Hugging Face's step is the `Trainer`'s: bf16 model, its own
packing (position ids that restart, FlashAttention 2 if installed, else SDPA, which then attends
over the whole pack: the JSON says which). Times are medians after a warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = Path(__file__).parents[1] / "tests" / "launch" / "configs"
IMAGE_SHARE = 0.5  # of the tokens
IMAGE_GRID = (1, 32, 32)  # patches: frames, rows, columns


def main() -> None:
    """Measure what was asked for and print one JSON object."""
    options = arguments()
    if options.device == "cpu":
        from mcore_qwen3vl.runtime import cpu

        cpu.install()
    config = shape(options.shape)
    results = {}
    for side in options.sides:
        results[side] = measure(side, config, options)
        gc.collect()  # the other side's peak must not count this side's model
        torch.cuda.empty_cache()
    print(
        json.dumps({"options": vars(options), "device": device_name(options), "results": results})
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="2B", help="tiny, or a size such as 2B or 4B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=4, help="samples in the pack")
    parser.add_argument(
        "--sides", nargs="+", choices=("te", "torch", "hf"), default=["torch", "hf"]
    )
    parser.add_argument("--recompute", action="store_true", help="full recompute on every side")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--peak-tflops", type=float, default=None)
    return parser.parse_args()


def shape(name: str) -> dict[str, Any]:
    """A ``config.json``, parsed."""
    from mcore_qwen3vl.tiny import tiny_config

    if name == "tiny":
        return tiny_config()
    text = (SHAPES / f"{name.lower().replace('-', '_')}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def measure(side: str, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Median step time and what follows from it, for one side."""
    from mcore_qwen3vl.config import Architecture
    from mcore_qwen3vl.training import flops
    from mcore_qwen3vl.training.metrics import device_peak_tflops

    architecture = Architecture.from_hf(config)
    torch.manual_seed(0)
    batch = make_batch(architecture, options)
    step, note = (hf_step if side == "hf" else our_step)(side, architecture, config, batch, options)
    for _ in range(options.warmup):
        step()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(step, options.device) for _ in range(options.steps)]
    median = statistics.median(seconds)
    lengths = batch["lengths"].double()
    squares = float(lengths.square().sum())
    frames = float(batch["grid"].prod(1).double().square().sum())
    patches = float(batch["grid"].prod(1).sum())
    operations = flops.language(architecture, options.seq_length, squares)
    operations += flops.vision(architecture, patches, frames)
    peak = options.peak_tflops or device_peak_tflops()
    return {
        "seconds": median,
        "fastest": min(seconds),
        "slowest": max(seconds),
        "tokens/s": options.seq_length / median,
        "TFLOP/s": operations / median / 1e12,
        "MFU": operations / median / 1e12 / peak if peak else None,
        "peak memory GB": peak_memory(options.device),
        "note": note,
    }


def timed(step: Callable[[], None], device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_memory(device: str) -> float:
    """Allocated on the GPU since the warm-up, or of the process since its start."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def make_batch(architecture: Any, options: argparse.Namespace) -> dict[str, Tensor]:
    """One pack on the host: samples of equal length, each text with as many images as fit half."""
    vision = architecture.vision
    grid = torch.tensor(IMAGE_GRID if options.shape != "tiny" else (1, 8, 8))
    features = int(grid.prod()) // vision.spatial_merge_size**2
    length = options.seq_length // options.samples
    images = max(int(length * IMAGE_SHARE) // (features + 2), 1)
    sample = torch.randint(0, min(architecture.vocab_size, 1000), (length,))
    sample[sample == architecture.image_token_id] = 0
    for image in range(images):
        start = 1 + image * (features + 2)
        sample[start] = architecture.vision_start_token_id
        sample[start + 1 : start + 1 + features] = architecture.image_token_id
    grids = grid.repeat(images * options.samples, 1)  # (images, 3)
    lengths = torch.full((options.samples,), length)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = sample.repeat(options.samples)[None]  # (1, S)
    return {
        "ids": ids,
        "labels": ids.roll(-1, 1),
        "grid": grids,
        "pixels": torch.randn(int(grids.prod(1).sum()), vision.patch_dim),
        "lengths": lengths,
        "bounds": bounds.int(),
    }


def our_step(
    spec: str, architecture: Any, config: dict[str, Any], batch: dict[str, Tensor], options: Any
) -> tuple[Callable[[], None], str]:
    """A step of the Megatron model under its own optimizer and gradient buffers."""
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from mcore_qwen3vl.runtime.parallel import Layout, initialize

    if not dist.is_initialized():
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl", rank=0, world_size=1)
        initialize(Layout())
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from mcore_qwen3vl.data.positions import mrope_position_ids
    from mcore_qwen3vl.model.attention import PackedSequence
    from mcore_qwen3vl.model.inputs import visual_inputs
    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    recompute = {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    } if options.recompute else {}  # fmt: skip
    model: Any = Qwen3VLModel.from_hf_config(
        architecture, spec=spec, params_dtype=dtype, **recompute
    )
    half = dtype == torch.bfloat16
    model = model.cuda() if options.device == "cuda" else model
    model = Float16Module(model.config, model) if half else model
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(model.config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-5, bf16=half, params_dtype=dtype, clip_grad=1.0,
            use_distributed_optimizer=True,
        ),
        [model],
    )  # fmt: skip
    device = torch.device(options.device)
    positions, _ = mrope_position_ids(
        architecture, batch["ids"], batch["grid"], None, cu_seqlens=batch["bounds"]
    )
    visual = visual_inputs(architecture, batch["ids"], batch["pixels"].to(dtype), batch["grid"])
    assert visual is not None
    visual = visual.to(device)
    packing = PackedSequence(
        qkv_format="thd",
        cu_seqlens_q=batch["bounds"].to(device),
        cu_seqlens_kv=batch["bounds"].to(device),
        max_seqlen_q=int(batch["lengths"].max()),
        max_seqlen_kv=int(batch["lengths"].max()),
        bounds=tuple(batch["bounds"].tolist()),
    )
    ids, labels, positions = (t.to(device) for t in (batch["ids"], batch["labels"], positions))

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = model(
            ids, positions, None, labels=labels, visual=visual, packed_seq_params=packing
        )
        losses.float().mean().backward()
        finalize_model_grads([model])
        optimizer.step()

    return step, "distributed optimizer with fp32 main weights and gradients"


def hf_step(
    side: str, architecture: Any, config: dict[str, Any], batch: dict[str, Tensor], options: Any
) -> tuple[Callable[[], None], str]:
    """What Hugging Face's ``Trainer`` does in a step, on the same pack."""
    import transformers
    from transformers.utils import is_flash_attn_2_available

    flash = options.device == "cuda" and is_flash_attn_2_available()
    attention = "flash_attention_2" if flash else "sdpa"
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    name = config["architectures"][0]
    hf_config = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))
    device = torch.device(options.device)
    with device:
        model = getattr(transformers, name)._from_config(
            hf_config.from_dict(config), dtype=dtype, attn_implementation=attention
        )
    model.train()
    if options.recompute:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=options.device == "cuda")
    inputs = hf_inputs(architecture, batch, dtype, device)

    def step() -> None:
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    whole = "" if flash else ", attending over the whole pack"
    return step, f"AdamW on {dtype} weights, {attention}{whole}"


def hf_inputs(
    architecture: Any, batch: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    from mcore_qwen3vl.data.positions import mrope_position_ids

    positions, _ = mrope_position_ids(
        architecture, batch["ids"], batch["grid"], None, cu_seqlens=batch["bounds"]
    )
    starts = torch.cat([torch.arange(int(n)) for n in batch["lengths"]])[None]
    inputs = {
        "input_ids": batch["ids"],
        "labels": batch["ids"],
        # Text positions, by which FlashAttention tells samples apart, then time, height, width.
        "position_ids": torch.cat([starts[None], positions]),
        "pixel_values": batch["pixels"].to(dtype),
        "image_grid_thw": batch["grid"],
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def device_name(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if options.device == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
