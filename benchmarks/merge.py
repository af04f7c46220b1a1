"""Merging an adapter against a plain copy of the checkpoint, and against `hf-to-hf` without one.

Makes checkpoints of real sizes with random weights, and adapters of rank 16 for them (language and
vision). Then, round by round, it copies the files, rewrites them on the same engine and merges. It
measures with `benchmarks/convert.py`: everything is on disk at the end, the source is not in the
page cache at the start, and memory is measured in separate runs.

    python benchmarks/merge.py [--models 2B 30B-A3B:6] [--rounds 3] [--rank 16] [--workers N]
                               [--scratch DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from convert import bytes_of, copy, forget, measure, run, summarise

from mcore_qwen3vl import console
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Factors, write_adapter
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, preset, resolve_targets
from mcore_qwen3vl.converters.adapters.merge import merge
from mcore_qwen3vl.converters.convert import hf_to_hf

COPY, REWRITE, MERGE = "copy", "hf-to-hf", "lora merge"


def make_adapter(base: Path, path: Path, rank: int) -> int:
    """Write an adapter with random factors for all but router and head, and return its bytes."""
    modules, parameters = preset("all", Architecture.from_hf(base))
    config = AdapterConfig(r=rank, target_modules=modules, target_parameters=parameters)
    factors = {
        name: Factors(
            torch.randn(spec.a_shape) * 0.02, torch.randn(spec.b_shape) * 0.02, rank, spec.scaling
        )
        for name, spec in resolve_targets(config, base).items()
    }
    write_adapter(path, config, factors, {}, base)
    return (path / "adapter_model.safetensors").stat().st_size


def one_round(
    base: Path, adapter: Path, scratch: Path, options: dict[str, Any], number: int, memory: bool
) -> dict[str, dict[str, float]]:
    """Measure each step once, in an order that rotates with the rounds."""
    target = scratch / "target"
    steps: list[tuple[str, Callable[..., object], tuple[Path, ...]]] = [
        (COPY, copy, (base, target)),
        (REWRITE, lambda a, b: hf_to_hf(a, b, **options), (base, target)),
        (MERGE, lambda a, b, c: merge(a, b, c, **options), (base, adapter, target)),
    ]
    results = {}
    for at in range(len(steps)):
        name, function, paths = steps[(at + number) % len(steps)]
        forget(base)
        forget(adapter)
        os.sync()
        results[name] = measure(function, *paths, look_at_memory=memory)
        shutil.rmtree(target)
    return results


def compare(base: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    adapter_bytes = make_adapter(base, scratch / "adapter", args.rank)
    run_of = (base, scratch / "adapter", scratch, {"workers": args.workers})
    rounds = [one_round(*run_of, number, False) for number in range(args.rounds)]
    memory = one_round(*run_of, 0, True)
    pairs = dict.fromkeys((COPY, REWRITE, MERGE), COPY)
    return {"adapter_bytes": adapter_bytes, **summarise(rounds, memory, bytes_of(base), pairs)}


if __name__ == "__main__":
    console.quiet_libraries()
    run(__doc__ or "", compare, "--rank")
