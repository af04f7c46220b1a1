"""One training step in one process: ours (spec te or torch) against Hugging Face's on one batch.

    python benchmarks/train_step.py --shape 2B --seq-length 8192          # CUDA
    python benchmarks/train_step.py --shape tiny --device cpu --seq-length 256
    python benchmarks/train_step.py --shape 2B --layers 2 --device cpu --seq-length 256

Both sides run forward, backward, clipping and AdamW on the same packed sequence of image and text
samples with random weights. Each runs in a process of its own, so that neither's memory counts for
the other. On CUDA both compute in bfloat16 and keep float32 main weights and gradients: ours as
Megatron does, Hugging Face's as `Trainer` does with ``bf16=True`` (autocast over float32 weights).
``--hf-weights bf16`` is Hugging Face's step without main weights, which saves memory but costs
precision. Hugging Face packs by restarting position ids, with FlashAttention 2 if installed, else
with SDPA under the block mask that it derives from them. On the CPU everything is float32. Times
are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.published_configs import PUBLISHED

IMAGE_SHARE = 0.5  # approximate share of the tokens
IMAGE_SIDE = 16  # features along the side of an image, or fewer in short samples


def main() -> None:
    """Measure the requested sides and print one JSON object."""
    options = parse_arguments()
    one, *others = options.sides
    if others:
        results = {side: measure_in_own_process(side) for side in options.sides}
    else:
        results = {one: measure_side(one, read_config(options.shape, options.layers), options)}
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    report = {"options": vars(options), "device": device, "results": results}
    print(json.dumps(report, indent=2))


def measure_in_own_process(side: str) -> dict[str, Any]:
    """Run this script for one side and return its result."""
    command = [sys.executable, *sys.argv, "--sides", side]  # the last --sides wins
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(output[output.index("{\n") :])["results"][side]
    return result


def parse_arguments() -> argparse.Namespace:
    """Read the command line; exit if the samples do not divide the sequence."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="2B", help="tiny, or a size such as 2B or 4B")
    parser.add_argument("--layers", type=int, help="keep so many, of each tower")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=4, help="samples in the pack")
    sides = ("te", "torch", "hf")
    parser.add_argument("--sides", nargs="+", choices=sides, default=["torch", "hf"])
    parser.add_argument("--hf-weights", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--recompute", action="store_true", help="full recompute on every side")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--peak-tflops", type=float, default=None)
    parser.add_argument("--profile", help="file for the kernels that take most of the GPU's time")
    parser.add_argument(
        "--model-time-on", metavar="KIND", help="on the simulated GPU: seconds on this kind of GPU"
    )
    options = parser.parse_args()
    if options.seq_length % options.samples:
        parser.error(f"--seq-length must be a multiple of the {options.samples} samples")
    return options


def read_config(name: str, layers: int | None) -> dict[str, Any]:
    """Return a parsed ``config.json``, cut to `layers` of each tower."""
    from mcore_qwen3vl.tiny import tiny_config

    if name == "tiny":
        config: dict[str, Any] = tiny_config()
    else:
        file = PUBLISHED / f"{name.lower().replace('-', '_')}.json"
        config = json.loads(file.read_text(encoding="utf-8"))
    if layers:
        text, vision = config["text_config"], config["vision_config"]
        text["num_hidden_layers"] = vision["depth"] = layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:layers]
        taps = len(vision["deepstack_visual_indexes"])
        vision["deepstack_visual_indexes"] = list(range(min(taps, layers)))
    return config


def measure_side(side: str, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return one side's median step time and the figures derived from it.

    The FLOPs are those of the samples, the same for both sides. What a side computes beyond them,
    such as masked scores, only costs it time.
    """
    if options.device == "cpu":
        from mcore_qwen3vl.runtime import cpu

        cpu.install()
    from mcore_qwen3vl.config import Architecture
    from mcore_qwen3vl.model import flops
    from mcore_qwen3vl.simulated_gpu.device import is_preloaded
    from mcore_qwen3vl.training.logs.metrics import device_peak_tflops

    if is_preloaded():
        from mcore_qwen3vl.rehearsal import stubs

        stubs.install_linear_attention()
    architecture = Architecture.from_hf(config)
    torch.manual_seed(0)
    batch = make_batch(architecture, options.seq_length, options.samples)
    step, note = (make_hf_step if side == "hf" else make_our_step)(
        side, architecture, config, batch, options
    )
    losses = [step() for _ in range(options.warmup)]
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    measured = [time_step(step, options.device) for _ in range(options.steps)]
    seconds = [elapsed for elapsed, _ in measured]
    median = statistics.median(seconds)
    squares = float(batch["lengths"].double().square().sum())
    of_images = batch["grid"].prod(1).double()
    frames, patches = float(of_images.square().sum()), float(of_images.sum())
    operations = flops.language(architecture, options.seq_length, squares)
    operations += flops.vision(architecture, patches, frames)
    tflops = options.peak_tflops or device_peak_tflops()
    peak = peak_memory(options.device)  # without what a profile adds
    more: dict[str, Any] = {}
    if options.device == "cuda":
        more["reserved GB"] = torch.cuda.max_memory_reserved() / 1e9
    if options.profile:
        more |= write_profile(step, options.profile)
    if options.model_time_on:
        more["modelled seconds"] = modelled_seconds(step, options.model_time_on)
    return {
        "seconds": median,
        "fastest": min(seconds),
        "slowest": max(seconds),
        "seconds of the CPU": statistics.median(used for _, used in measured),
        "first loss": float(losses[0]) if losses else None,
        "tokens": batch["ids"].numel(),
        "patches": int(patches),
        "images": len(batch["grid"]),
        "tokens/s": batch["ids"].numel() / median,
        "TFLOP/s": operations / median / 1e12,
        "MFU": operations / median / 1e12 / tflops if tflops else None,
        "peak memory GB": peak,
        "note": note,
        **more,
    }


def write_profile(step: Callable[[], Any], file: str) -> dict[str, Any]:
    """Write the 25 kernels that take most of the GPU's time in a step, and return the sums.

    If the GPU cannot be profiled, say why instead: the measurement must not be lost.
    """
    from torch.profiler import ProfilerActivity

    from mcore_qwen3vl.simulated_gpu.device import is_preloaded

    if is_preloaded():
        return {"profile": "none: the simulated GPU has no clock"}
    steps = 2
    try:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as taken:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
        kernels = [
            event for event in taken.key_averages()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]  # fmt: skip
    except (RuntimeError, AttributeError) as error:
        return {"profile": f"none: {error}"}
    kernels.sort(key=lambda event: -event.self_device_time_total)
    rows = [(e.self_device_time_total / steps / 1e3, e.count / steps, e.key) for e in kernels]
    sums = {"kernel ms": sum(row[0] for row in rows), "launches": sum(row[1] for row in rows)}
    with open(file, "w") as out:
        out.write("{kernel ms:.1f} ms of kernels, {launches:.0f} launches a step\n".format(**sums))
        out.writelines(f"{ms:10.3f} ms {n:8.0f} x  {name[:140]}\n" for ms, n, name in rows[:25])
    return {**sums, "profile": file}


def modelled_seconds(step: Callable[[], Any], kind: str) -> float:
    """Return a step's seconds by the model of ``rehearse``, from its work on the simulated GPU.

    For the whole step that is the GPU's time, or the host's where it is longer.
    """
    from mcore_qwen3vl.rehearsal.holders import BACKWARD, FORWARD
    from mcore_qwen3vl.rehearsal.step_time import Constants, Model, RankWork
    from mcore_qwen3vl.runtime.gpus import find_gpu
    from mcore_qwen3vl.simulated_gpu import rank
    from mcore_qwen3vl.simulated_gpu.rank import count_transformer_engine

    if rank.current is None:
        sys.exit(
            "--model-time-on counts a step's work: run it under -m mcore_qwen3vl.simulated_gpu"
        )
    rank.current.end_interval("before")
    with count_transformer_engine(rank.current.work.counts):
        step()
    interval = rank.current.end_interval("step")
    work = RankWork("step", 1, [{FORWARD: {}, BACKWARD: {}}], interval, 1, 1, 1)
    return Model(find_gpu(kind), Constants(), ()).step([work], 1, 1, 1, 1).seconds


def time_step(step: Callable[[], Any], device: str) -> tuple[float, float]:
    """Return elapsed seconds and CPU seconds, which are the better measure on a busy machine."""
    synchronize(device)
    started, used = time.perf_counter(), time.process_time()
    step()
    synchronize(device)
    return time.perf_counter() - started, time.process_time() - used


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_memory(device: str) -> float:
    """Return peak GB: allocated on the GPU since the warm-up, or of this process on the CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def make_batch(architecture: Any, seq_length: int, samples: int) -> dict[str, Tensor]:
    """Make one pack on the host: samples of equal length, each half text and half images."""
    vision = architecture.vision
    length = seq_length // samples
    share = int(length * IMAGE_SHARE)  # tokens of a sample
    side = min(IMAGE_SIDE, int((share - 2) ** 0.5))  # merged patches, between two brackets
    grid = torch.tensor([1, *[side * vision.spatial_merge_size] * 2])
    features = side**2
    images = share // (features + 2)
    sample = torch.randint(0, min(architecture.vocab_size, 1000), (length,))
    for placeholder in (architecture.image_token_id, architecture.video_token_id):
        sample[sample == placeholder] = 0
    for image in range(images):
        start = 1 + image * (features + 2)
        sample[start] = architecture.vision_start_token_id
        sample[start + 1 : start + 1 + features] = architecture.image_token_id
    grids = grid.repeat(images * samples, 1)  # (images, 3)
    lengths = torch.full((samples,), length)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = sample.repeat(samples)[None]  # (1, S)
    return {
        "ids": ids,
        "labels": ids.roll(-1, 1),
        "grid": grids,
        "pixels": torch.randn(int(grids.prod(1).sum()), vision.patch_dim),
        "lengths": lengths,
        "bounds": bounds.int(),
    }


def make_our_step(
    spec: str, architecture: Any, config: dict[str, Any], batch: dict[str, Tensor], options: Any
) -> tuple[Callable[[], Tensor], str]:
    """Return a step of the Megatron model with its own optimizer and gradient buffers."""
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    from mcore_qwen3vl.layout import Layout
    from mcore_qwen3vl.runtime.gpus import order_transfers
    from mcore_qwen3vl.runtime.launch import initialize

    order_transfers()
    if not dist.is_initialized():
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl", rank=0, world_size=1)
        initialize(Layout())
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.module import Float16Module

    from mcore_qwen3vl.data.encoding.batch import mrope_position_ids
    from mcore_qwen3vl.model.decoder.attention import PackedSequence
    from mcore_qwen3vl.model.inputs import visual_inputs
    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
    from mcore_qwen3vl.training.optimizer import use_fused_adam, use_multi_tensor

    use_multi_tensor()
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
    sharded = options.device == "cuda"  # as in the launch scripts; train --cpu does so if asked
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    model = DistributedDataParallel(model.config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-5, bf16=half, params_dtype=dtype, clip_grad=1.0,
            use_distributed_optimizer=sharded,
        ),
        [model],
    )  # fmt: skip
    use_fused_adam(optimizer)  # as training does
    device = torch.device(options.device)
    positions, _ = mrope_position_ids(
        architecture, batch["ids"], batch["grid"], None, cu_seqlens=batch["bounds"]
    )
    visual = visual_inputs(architecture, batch["ids"], batch["pixels"].to(dtype), batch["grid"])
    assert visual is not None
    visual = visual.to(device)
    bounds = PackedSeqParams(qkv_format="thd", cu_seqlens_q=batch["bounds"])
    packing = PackedSequence.from_params(bounds, device)
    ids, labels, positions = (t.to(device) for t in (batch["ids"], batch["labels"], positions))

    def step() -> Tensor:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = model(
            ids, positions, None, labels=labels, visual=visual, packed_seq_params=packing
        )
        loss = losses.float().mean()
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()
        return loss.detach()

    return step, f"{spec} spec, {dtype} with float32 main weights and gradients"


def make_hf_step(
    side: str, architecture: Any, config: dict[str, Any], batch: dict[str, Tensor], options: Any
) -> tuple[Callable[[], Tensor], str]:
    """Return a step as Hugging Face's ``Trainer`` does it, on the same pack."""
    import transformers
    from transformers.utils import is_flash_attn_2_available

    cuda = options.device == "cuda"
    attention = "flash_attention_2" if cuda and is_flash_attn_2_available() else "sdpa"
    dtype = torch.bfloat16 if cuda and options.hf_weights == "bf16" else torch.float32
    name = config["architectures"][0]
    hf_config = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))
    device = torch.device(options.device)
    with device:
        model = getattr(transformers, name)._from_config(
            hf_config.from_dict(config), dtype=dtype, attn_implementation=attention
        )
    model.train()
    if options.recompute:
        # transformers 5.24 renamed it, and warns of the earlier name.
        renamed = getattr(model, "activation_checkpointing_enable", None)
        (renamed or model.gradient_checkpointing_enable)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
    inputs = hf_inputs(architecture, batch, dtype, device)
    autocast = torch.autocast(options.device, torch.bfloat16, enabled=cuda)

    def step() -> Tensor:
        optimizer.zero_grad()
        with autocast:
            # With a cache, Hugging Face would not look for the samples' bounds under SDPA.
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    computes = "bfloat16 autocast over " if cuda and dtype == torch.float32 else ""
    return step, f"{attention}, {computes}{dtype} weights"


def hf_inputs(
    architecture: Any, batch: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return the arguments of Hugging Face's forward for a pack, on its device."""
    from mcore_qwen3vl.data.encoding.batch import mrope_position_ids

    positions, _ = mrope_position_ids(
        architecture, batch["ids"], batch["grid"], None, cu_seqlens=batch["bounds"]
    )
    positions_in_samples = torch.cat([torch.arange(int(n)) for n in batch["lengths"]])[None]
    inputs = {
        "input_ids": batch["ids"],
        "labels": batch["ids"],  # which Hugging Face shifts by itself
        # Text positions, which FlashAttention separates samples by, then time, height, width.
        "position_ids": torch.cat([positions_in_samples[None], positions]),
        "pixel_values": batch["pixels"].to(dtype),
        "image_grid_thw": batch["grid"],
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


if __name__ == "__main__":
    sys.exit(main())
