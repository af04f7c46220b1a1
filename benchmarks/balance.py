"""How evenly packs divide the work of a step over data-parallel ranks.

    python benchmarks/balance.py [--shape 8b] [--samples 120000] [--output balance.json]

Three ways to make packs of 8192 tokens and to divide a global batch of 512 of them, at DP 8 and 64:

- ``each rank by length``: without ``--balance``: every rank packs its own part, buffer by buffer
- ``all ranks by length``: one buffer for all ranks, divided as by ``--balance``, but by tokens
- ``all ranks by work``: ``--balance``

In a *micro-batch step* every rank works on one pack. The figure is the sum over the steps of the
most work of a rank, divided by the sum of the mean work: the time that is taken over the time that
even work would take. In the *optimizer step* only the ranks' totals count. That is enough where
only the gradients tie ranks together; experts divided over ranks tie them in every layer.

The mixture is synthetic and heavy-tailed. Of the samples

- half are text of ``50 (1 + Pareto(1.1))`` tokens, at most 8000;
- two fifths hold 1 to 4 images of ``64 (1 + Pareto(0.5))`` patches, at most 16384 each, and text as
  above, at most 500 tokens;
- a tenth hold a video of 4 to 64 pairs of frames with 256 to 1024 patches each, and such text.

Images and frames are dropped from the end until a sample fits into a pack. Work is the FLOPs of
``mcore_qwen3vl.model.flops``: linear layers over the whole pack with its padding, attention by the
square of a sample's length, vision per patch and by the square of a frame's patches. Only active
experts count. Nothing is read or decoded: this measures the division.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.packing import Measure, Size, Workload, all_ranks, each_rank
from mcore_qwen3vl.shapes import SHAPES

CAPACITY = 8192
GLOBAL_BATCH = 512
BUFFER = 128  # samples per rank, as with --packing-buffer


def draw(count: int, seed: int) -> list[Size]:
    """Draw samples from the mixture in the module's docstring."""
    random = np.random.default_rng(seed)
    sizes = []
    for kind in random.choice(3, count, p=[0.5, 0.4, 0.1]):
        text = int(min(8000, 50 * (1 + random.pareto(1.1))))
        frames: list[int] = []
        if kind == 1:
            images = int(random.integers(1, 5))
            drawn = 64 * (1 + random.pareto(0.5, images))
            frames = [int(patches) // 4 * 4 for patches in np.minimum(drawn, 16384)]
        elif kind == 2:
            frames = [4 * int(random.integers(64, 257))] * int(random.integers(4, 65))
        text = min(text, 500) if kind else text
        while text + sum(frames) // 4 > CAPACITY:
            frames.pop()
        squares = float(sum(patches**2 for patches in frames))
        sizes.append(Size(text + sum(frames) // 4, sum(frames), squares))
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="8b", help="2b, 4b, 8b, 32b, 30b_a3b or 235b_a22b")
    parser.add_argument("--samples", type=int, default=120_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the JSON here, too")
    args = parser.parse_args()

    model = Architecture.from_hf(SHAPES / f"{args.shape}.json")
    load = Workload(model, draw(args.samples, args.seed), CAPACITY)
    by_length = [Measure(length, float(length)) for length in load.lengths]
    results: dict[str, Any] = {
        "shape": args.shape,
        "samples": args.samples,
        "mean_tokens": float(np.mean(load.lengths)),
        "work_beyond_linear_layers": sum(load.extra) / load.linear * CAPACITY / sum(load.lengths),
    }
    for ranks in (8, 64):
        per_step = GLOBAL_BATCH // ranks
        ways = {
            "each rank by length": each_rank(load.lengths, CAPACITY, ranks, BUFFER),
            "all ranks by length": all_ranks(by_length, CAPACITY, ranks, BUFFER, per_step),
            "all ranks by work": all_ranks(load.measures(), CAPACITY, ranks, BUFFER, per_step),
        }
        for name, rows in ways.items():
            start = time.process_time()
            made = list(rows)
            seconds = time.process_time() - start
            found = asdict(load.balance(made, per_step))
            del found["packs"]
            results[f"DP {ranks}, {name}"] = {
                **found,
                "optimizer_steps": len(made) // per_step,
                "milliseconds_per_global_batch": 1e3 * seconds * per_step / len(made),
            }
    text = json.dumps(results, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
