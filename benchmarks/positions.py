"""Time position ids against Hugging Face's ``get_rope_index``, in microseconds per sample.

Both are timed in turn on the same samples. The ratio is taken round by round and its median
printed, so that a busy machine slows both sides of it.

    python benchmarks/positions.py [--rounds 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3VLConfig, Qwen3VLModel

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.positions import mrope_position_ids
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

IMAGE = (48, 64)  # 768 x 1024 pixels with patches of 16: 768 tokens
VIDEO = (22, 40)  # frames of 352 x 640 pixels: 220 tokens each


def sample(architecture: Architecture, kind: str, length: int) -> tuple[torch.Tensor, ...]:
    """Return token ids (1, length) and grids (n, 3).

    Images follow after 100 text tokens each, video frames after 6.
    """
    is_image = kind == "images"
    token = architecture.image_token_id if is_image else architecture.video_token_id
    rows, columns = IMAGE if is_image else VIDEO
    turn = [1] * (100 if is_image else 6) + [architecture.vision_start_token_id]
    turn += [token] * (rows * columns // 4) + [architecture.vision_end_token_id]
    count = length // len(turn)
    ids = turn * count + [1] * (length - count * len(turn))
    grid = [[1, rows, columns]] * count if is_image else [[count, rows, columns]]
    return torch.tensor([ids]), torch.tensor(grid)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(kind: str, length: int, rounds: int) -> dict[str, float | str]:
    config = tiny_config()
    architecture = Architecture.from_hf(config)
    with torch.device("meta"):
        hf_model = Qwen3VLModel(Qwen3VLConfig(**config))
    ids, grid = sample(architecture, kind, length)
    images, videos = (grid, None) if kind == "images" else (None, grid)
    types = (ids == architecture.image_token_id) + 2 * (ids == architecture.video_token_id)

    def ours() -> torch.Tensor:
        return mrope_position_ids(architecture, ids, images, videos)[0]

    def theirs() -> torch.Tensor:
        return hf_model.get_rope_index(ids, types, images, videos)[0]

    assert torch.equal(ours(), theirs())  # also warms both up
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    return {
        "sample": f"{kind} {length // 1024}k",
        "ours_us": statistics.median(a for a, _ in pairs) * 1e6,
        "hf_us": statistics.median(b for _, b in pairs) * 1e6,
        "speedup": statistics.median(b / a for a, b in pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        measure(kind, length, arguments.rounds)
        for kind in ("images", "videos")
        for length in (8192, 32768)
    ]
    print(f"{'sample':>12} {'ours (us)':>10} {'HF (us)':>10} {'speedup':>8}")
    for row in results:
        print("{sample:>12} {ours_us:10.0f} {hf_us:10.0f} {speedup:7.1f}x".format(**row))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
