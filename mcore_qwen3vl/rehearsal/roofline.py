"""A roofline of a training step's seconds under a layout, from the model's shape alone.

* Compute: the step's FLOPs (:mod:`mcore_qwen3vl.model.flops`, a third more under full recompute)
  run at half of the GPU's dense bf16 peak. The vision tower runs on the first pipeline stage.
* TP with SP: each layer has two all-gathers and two reduce-scatters of the hidden states in each
  direction, and two more all-gathers in the backward pass. CP gathers keys and values and scatters
  their gradients. EP sends and returns tokens in both directions. Nothing overlaps with compute.
* DP: gradients in fp32 and weights in bf16 are exchanged once a step. The exchange overlaps with
  compute, and counts if it takes longer.
* Bandwidth: NVLink's within 8 GPUs, 50 GB/s a GPU (400 Gb/s) beyond. Latency and kernel launches
  are left out.
* Pipeline: all micro-batches pass the slowest stage, and one passes all other stages, whose time
  virtual stages divide.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import flops
from mcore_qwen3vl.runtime.gpus import Gpu
from mcore_qwen3vl.training import memory

EFFICIENCY = 0.5
NETWORK = 50e9  # bytes per second and GPU
NODE = 8
HALF, SINGLE = 2, 4  # bytes
RECOMPUTE = 4 / 3


@dataclass(frozen=True)
class Step:
    """The sizes of one optimizer step.

    Attributes:
        sample: tokens of a sample, half of which are image tokens.
        image: tokens of an image.
    """

    seq_length: int
    rows: int
    micro_batches: int
    sample: int
    image: int


def step_seconds(a: Architecture, layout: Layout, gpu: Gpu, step: Step, recompute: bool) -> float:
    """Return the modelled seconds of a step."""
    tokens = step.seq_length * step.rows
    patches = a.vision.spatial_merge_size**2  # of an image token
    visual = tokens / 2 * patches
    language = flops.language(a, tokens, tokens * step.sample)
    vision = flops.vision(a, visual, visual * step.image * patches)
    divided = layout.tp * layout.cp
    speed = EFFICIENCY * gpu.tflops * 1e12 / (RECOMPUTE if recompute else 1)
    every = language / layout.pp / divided / speed
    exchange = _exchange(a, layout, gpu, tokens, recompute) / layout.pp
    stages = [every + exchange] * layout.pp
    stages[0] += vision / divided / speed
    slowest = max(stages)
    work = step.micro_batches * slowest + (sum(stages) - slowest) / layout.vpp
    return max(work, _gradients(a, layout, gpu))


def _exchange(a: Architecture, layout: Layout, gpu: Gpu, tokens: int, recompute: bool) -> float:
    """Return the seconds of all exchanges but DP's, over all layers, for one micro-batch."""
    forward = 2 if recompute else 1
    local = tokens / layout.cp
    hidden = local * a.hidden_size * HALF
    seconds = 0.0
    if layout.tp > 1:
        seconds += (4 * forward + 6) * _moved(hidden, layout.tp, layout.tp, gpu)
    if layout.cp > 1:
        keys = 2 * tokens * a.num_key_value_heads * a.head_dim / layout.tp * HALF
        seconds += (forward + 1) * _moved(keys, layout.cp, layout.tp * layout.cp, gpu)
    seconds *= a.num_hidden_layers
    if layout.ep > 1:
        routed = hidden / layout.tp * a.num_experts_per_tok
        each = _moved(routed, layout.ep, layout.ep * layout.etp, gpu)
        seconds += sum(a.moe_layers) * 2 * (forward + 1) * each
    return seconds


def _gradients(a: Architecture, layout: Layout, gpu: Gpu) -> float:
    """Return the seconds of the data-parallel exchange, on the stage where it takes longest."""
    span = layout.tp * layout.cp * layout.dp
    seconds = []
    for stage in range(layout.pp):
        shared, experts = memory.rank_parameters(a, layout, stage)
        copies = (layout.dp * layout.cp, span / (layout.ep * layout.etp))
        seconds.append(
            sum(
                _moved(count * (SINGLE + HALF), parts, span, gpu)
                for count, parts in zip((shared, experts), copies, strict=True)
                if parts > 1
            )
        )
    return max(seconds)


def _moved(size: float, parts: float, span: int, gpu: Gpu) -> float:
    """Return the seconds to exchange `size` bytes between `parts` ranks within `span` GPUs."""
    bandwidth = gpu.nvlink_gb_per_s * 1e9 if span <= NODE else NETWORK
    return size * (parts - 1) / parts / bandwidth
