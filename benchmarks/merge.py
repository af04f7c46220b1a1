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
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from convert import copy, forget, measure, write_checkpoint

from mcore_qwen3vl import console
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Factors
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.adapters.merge import merge
from mcore_qwen3vl.converters.adapters.presets import preset
from mcore_qwen3vl.converters.adapters.targets import resolve_targets
from mcore_qwen3vl.converters.adapters.write import write_adapter
from mcore_qwen3vl.converters.convert import hf_to_hf
from mcore_qwen3vl.shapes import SHAPES

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


def summarise(rounds: list[dict[str, Any]], memory: dict[str, Any], nbytes: int) -> dict[str, Any]:
    """Return medians; ratios to the copy are taken within a round."""
    summary: dict[str, Any] = {}
    for name in (COPY, REWRITE, MERGE):
        seconds = [round_[name]["seconds"] for round_ in rounds]
        ratios = [round_[name]["seconds"] / round_[COPY]["seconds"] for round_ in rounds]
        summary[name] = {
            "seconds": statistics.median(seconds),
            "gb_per_s": nbytes / 1e9 / statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "all_ratios": [round(ratio, 2) for ratio in ratios],
            "cpu_seconds": statistics.median(round_[name]["cpu_seconds"] for round_ in rounds),
            **memory[name],
        }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["2B"], help="NAME or NAME:LAYERS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console.quiet_libraries()
    results: dict[str, Any] = {}
    for model in args.models:
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            scratch = Path(folder)
            name, _, layers = model.partition(":")
            file = SHAPES / f"{name.lower().replace('-', '_')}.json"
            config = json.loads(file.read_text(encoding="utf-8"))
            if layers:
                config["text_config"]["num_hidden_layers"] = int(layers)
            base = write_checkpoint(config, scratch / "hf")
            nbytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))
            adapter_bytes = make_adapter(base, scratch / "adapter", args.rank)
            options = {"workers": args.workers}
            run = (base, scratch / "adapter", scratch, options)
            rounds = [one_round(*run, number, False) for number in range(args.rounds)]
            memory = one_round(*run, 0, True)
        results[model] = {"bytes": nbytes, "adapter_bytes": adapter_bytes}
        results[model] |= summarise(rounds, memory, nbytes)
        print(
            f"{model}: checkpoint {nbytes / 1e9:.2f} GB, adapter {adapter_bytes / 1e6:.0f} MB\n"
            f"{'':12}{'s':>8}{'GB/s':>7}{'ratio':>7}{'CPU s':>8}{'peak GB':>9}{'idle GB':>9}"
        )
        for step, found in list(results[model].items())[2:]:
            print(
                f"{step:12}{found['seconds']:8.1f}{found['gb_per_s']:7.2f}{found['ratio']:7.2f}"
                f"{found['cpu_seconds']:8.1f}{found['peak_gb']:9.2f}{found['idle_gb']:9.2f}"
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
