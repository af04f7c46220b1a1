"""Export of weights to a rollout engine, against a plain all-gather of the same bytes.

It runs on the CPU with gloo, each way in processes of its own that hold the same model, and prints
seconds and a rank's peak memory beyond its weights. `merged` merges adapters of rank 16 into the
language model's weights. Received tensors are dropped, as a rollout engine overwrites its buffer.

    python benchmarks/hand_off.py --layout tp2xpp2 --width 2048 --layers 8
    python benchmarks/hand_off.py --layout tp2xep2xdp2+sp --moe --width 512 --layers 8
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

RANK = 16
CHUNK = 16 * 2**20
"""Number of values of a rank that one plain all-gather moves."""


def plain(chunks: list[Any], _config: Any) -> Iterator[int]:
    """Gather all ranks' parameters on every rank, in pieces; ranks with fewer pad the last ones."""
    import torch
    import torch.distributed as dist

    mine = torch.cat([p.data.flatten() for chunk in chunks for p in chunk.parameters()])
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(mine))
    for first in range(0, max(counts), CHUNK):
        size = min(CHUNK, max(counts) - first)
        piece = torch.nn.functional.pad(mine[first : first + size], (0, size))[:size]
        gathered = [torch.empty_like(piece) for _ in counts]
        dist.all_gather(gathered, piece)
        yield sum(t.nbytes for t in gathered)


def exported(chunks: list[Any], _config: Any) -> Iterator[int]:
    from mcore_qwen3vl.converters.live.export import export_hf

    for _, tensor in export_hf(chunks, expert_layout="published"):
        yield tensor.nbytes


def merged(chunks: list[Any], config: dict[str, Any]) -> Iterator[int]:
    from mcore_qwen3vl.converters.adapters.config import resolve_targets
    from mcore_qwen3vl.converters.live.export import export_merged

    targets = resolve_targets(adapter_config(chunks[0].architecture), config)
    for _, tensor in export_merged(chunks, targets, expert_layout="published"):
        yield tensor.nbytes


def adapter_config(architecture: Architecture) -> Any:
    from mcore_qwen3vl.converters.adapters.config import AdapterConfig, preset

    modules, parameters = preset("language", architecture)
    return AdapterConfig(r=RANK, target_modules=modules, target_parameters=parameters)


WAYS: dict[str, Callable[[list[Any], Any], Iterator[int]]] = {
    "plain all-gather": plain,
    "export": exported,
    "export, merged": merged,
}


def on_rank(way: str, layout: Layout, config: dict[str, Any]) -> tuple[float, float, float, float]:
    """Return seconds, exported bytes, peak bytes beyond the weights, and bytes of the weights."""
    import torch
    import torch.distributed as dist

    from mcore_qwen3vl.converters.adapters.config import resolve_targets
    from mcore_qwen3vl.converters.live.sharded import initialize_factors
    from mcore_qwen3vl.model.build import build_chunks
    from mcore_qwen3vl.model.lora.attach import attach
    from mcore_qwen3vl.runtime.parallel import initialize

    initialize(layout)
    architecture = Architecture.from_hf(config)
    chunks = build_chunks(architecture, layout, params_dtype=torch.bfloat16)
    if way == "export, merged":
        for chunk in chunks:
            attach(chunk, resolve_targets(adapter_config(architecture), config))
            initialize_factors(chunk, seed=0)
    held = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
    dist.barrier()
    before, start = resident(), time.perf_counter()
    size = sum(WAYS[way](chunks, config))
    dist.barrier()
    return time.perf_counter() - start, size, resident() - before, held


def resident() -> float:
    """Return the peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="tp2xpp2")
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    heads = options.width // 128
    text = {
        "hidden_size": options.width,
        "head_dim": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 4, 4),
        "intermediate_size": 3 * options.width,
        "moe_intermediate_size": options.width // 2,
        "num_experts": 32,
        "num_hidden_layers": options.layers,
        "vocab_size": options.vocabulary,
        "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"
        },
    }  # fmt: skip
    config = tiny_config(moe=options.moe, text=text)
    layout = Layout.parse(options.layout)
    print(f"{'way':18} {'s':>7} {'GB handed on':>13} {'GB at the peak':>15} {'ratio':>6}")
    first = None
    for way in WAYS:
        runs = [
            run_layout(on_rank, layout.world_size, way, layout, config, timeout=600)
            for _ in range(options.rounds)
        ]
        seconds = sorted(max(rank[0] for rank in run) for run in runs)[len(runs) // 2]
        peak = max(rank[2] for run in runs for rank in run)
        first = first or seconds
        handed = runs[0][0][1] / 1e9
        print(f"{way:18} {seconds:7.2f} {handed:13.2f} {peak / 1e9:15.2f} {seconds / first:6.2f}")


if __name__ == "__main__":
    main()
