"""Balanced work by the number of data-parallel ranks: the time to divide samples, and its balance.

    python benchmarks/balance.py [--model 2b] [--dp 8 64 128 256 1024] [--mix chat documents tails]
    python benchmarks/balance.py --seq-length 32768 --buffer 128 256 512 --dp 8 32
    python benchmarks/balance.py --page FILE  # a page of Markdown too, for docs/measurements

Every data worker of every rank divides the samples of all ranks. The time is processor time of one
division of ``--buffer`` samples a rank, the least of three, without measuring or reading them; a
pack's is that of one pack of one rank. The ranks wait for the most expensive pack of a row:
``mean`` is the time of all rows over the time of perfect balance, and ``worst`` is the same for one
row. It prints a table of Markdown.

Lengths are drawn anew, the same each time, up to the length of a pack:

- ``chat``: short conversations, half of them with an image
- ``documents``: the same, and one sample in ten is text of up to a whole pack
- ``tails``: text and images whose sizes have heavy tails
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path

import numpy as np

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.sizes import Size
from mcore_qwen3vl.data.workload import Workload, pack_by_work
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.verification.figures import write_figures

BATCH = 4  # micro-batches of a step
EXPLAINED = """\
A time is processor time of one process. `a pack` is the time of one pack of one rank. Ranks wait
for the most expensive pack of a row: `mean` is the time of all rows over the time of perfect
balance, and `worst` that of one row.
"""


def draw(mix: str, count: int, capacity: int) -> list[Size]:
    """Draw the sizes of samples that fit into a pack."""
    random = np.random.default_rng(0)
    pictured = random.random(count) < 0.5
    if mix == "tails":
        text = 50 * (1 + random.pareto(1.1, count))
        patches = 64 * (1 + random.pareto(0.5, count))
    else:
        text = 20 + random.lognormal(np.log(350), 1.1, count)
        patches = random.lognormal(np.log(1600), 0.8, count)
        if mix == "documents":
            long = random.random(count) < 0.1
            text = np.where(long, random.uniform(0.3, 1, count) * capacity, text)
            pictured &= ~long
    merged = pictured * np.minimum(patches // 4, 1280)
    text = np.minimum(text, 0.98 * capacity)
    merged = np.minimum(merged, capacity - text)
    pairs = zip(text.astype(int).tolist(), merged.astype(int).tolist(), strict=True)
    return [Size(words + image, 4 * image, (4.0 * image) ** 2) for words, image in pairs]


def main() -> None:
    """Measure what the command line names, and print a table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="2b")
    parser.add_argument("--mix", nargs="+", default=["chat", "documents", "tails"])
    parser.add_argument("--dp", nargs="+", type=int, default=[8, 64, 128, 256, 1024])
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--buffer", nargs="+", type=int, default=[128])
    parser.add_argument("--page", type=Path, help="file for a page of Markdown")
    options = parser.parse_args()
    model = Architecture.from_hf(PUBLISHED / f"{options.model}.json")
    lines = [
        "| samples | DP | buffer | packs a rank | divided in, s | a pack, ms | mean | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    print(*lines, sep="\n")
    for mix, ranks, buffer in product(options.mix, options.dp, options.buffer):
        lines.append(measure(model, mix, ranks, buffer, options.seq_length))
        print(lines[-1], flush=True)
    if options.page:
        command = f"python benchmarks/balance.py --seq-length {options.seq_length}"
        text = "\n".join([EXPLAINED, *lines])
        write_figures(options.page, "Balanced work", command, text, model=options.model)


def measure(model: Architecture, mix: str, ranks: int, buffer: int, capacity: int) -> str:
    """Divide a few buffers, and return a row of the table."""
    buffers = 2 if ranks > 128 else 8
    load = Workload(model, draw(mix, buffers * buffer * ranks, capacity), capacity)
    times = []
    for _ in range(3):
        start = time.process_time()
        rows = list(pack_by_work(load.lengths, load.extra, capacity, ranks, buffer, BATCH))
        times.append(time.process_time() - start)
    balance = load.balance(rows, 1)
    return (
        f"| {mix} | {ranks:,} | {buffer} | {len(rows) / buffers:.1f} | {min(times) / buffers:.3f} "
        f"| {1000 * min(times) / len(rows):.1f} | {balance.micro_batch_step:.4f} "
        f"| {balance.worst_micro_batch_step:.4f} |"
    )


if __name__ == "__main__":
    main()
