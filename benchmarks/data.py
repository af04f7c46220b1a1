"""Data throughput per worker, against the cost of Hugging Face's processor alone.

    python benchmarks/data.py [--hf-model DIR] [--samples 200] [--output data.json]

Both run in one process on one thread, on the same samples, in turns. Costs are CPU time, which a
busy machine disturbs least, and the ratio is taken round by round. Between machines, compare only
the ratios:

- ``processor``: HF's processor called on each sample (chat template, images, tokens), nothing else
- ``ours``: what one data worker does, from a JSONL line to packed batches with labels, position
  ids and indexed images, whose pixels are bytes
- ``ours_normalised``: the same, plus the normalisation of pixels as the processor returns them, on
  this CPU; in training the model does that on its device

Without ``--hf-model`` a locally made byte-level tokenizer and image processor are used, with the
real models' patch size. Images are 64 to 1024 tokens for both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_utils import load_image

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import Counts, DataConfig, Loader, MediaLimits, Source, load_processor
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import Conversation, parse_record
from mcore_qwen3vl.tiny import tiny_config, write_processor

REAL_PATCHES = {"patch_size": 16}
LIMITS = MediaLimits(image_min_pixels=64 * 32**2, image_max_pixels=1024 * 32**2)


def write_samples(folder: Path, count: int, kind: str) -> Path:
    """Write synthetic question-answer pairs of varied length, with JPEG photos of varied size."""
    random = np.random.default_rng(0)
    lines = []
    for index in range(count):
        words = " ".join("word" for _ in range(int(random.integers(20, 300))))
        record: dict[str, Any] = {}
        if kind == "image":
            height, width = random.integers(320, 960, 2).tolist()
            coarse = random.integers(0, 256, (height // 16, width // 16, 3), np.uint8)
            image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            image.save(folder / f"{index}.jpg")
            record["images"] = [f"{index}.jpg"]
        tag = "<image>" if kind == "image" else ""
        record["messages"] = [
            {"role": "user", "content": f"{tag}{index} {words}"},
            {"role": "assistant", "content": words},
        ]
        lines.append(json.dumps(record))
    path = folder / f"{kind}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run_processor(processor: Any, path: Path) -> tuple[float, int]:
    """Return (CPU seconds, tokens) of HF's processor over all samples."""
    tokens = 0
    start = time.process_time()
    for line in path.open(encoding="utf-8"):
        parsed = parse_record(json.loads(line), MediaFolder(path.parent, {}))
        assert isinstance(parsed, Conversation)
        text = processor.apply_chat_template(parsed.messages, tokenize=False)
        images = [load_image(str(item.content)) for item in parsed.media] or None
        tokens += processor(text=[text], images=images, return_tensors="pt")["input_ids"].numel()
    return time.process_time() - start, tokens


def run_ours(loader: Loader, samples: int) -> tuple[float, float, Counts]:
    """Read batches of `samples` or more; return CPU seconds, those of normalising, and counts."""
    counts = Counts()
    seconds = normalising = 0.0
    while counts.samples < samples:
        start = time.process_time()
        batch = next(loader)
        read = time.process_time()
        if batch.visual is not None and batch.visual.pixel_scale is not None:
            batch.visual.pixel_scale.apply(batch.visual.pixel_values)
        seconds += read - start
        normalising += time.process_time() - read
        counts += batch.counts
    return seconds, normalising, counts


def measure(model: Path, path: Path, samples: int, rounds: int, seq_length: int) -> dict[str, Any]:
    """Run both in turns, and return medians over the rounds after one warm-up round."""
    return measure_against(model, path, path, samples, rounds, seq_length)


def measure_against(
    model: Path, jsonl: Path, path: Path, samples: int, rounds: int, seq_length: int
) -> dict[str, Any]:
    """Run :func:`measure` on the same samples twice: the processor on `jsonl`, ours on `path`."""
    architecture = Architecture.from_hf(model)
    config = DataConfig(seq_length=seq_length, packing=True, media=LIMITS)
    loader = Loader([Source(path)], architecture, load_processor(model), config, num_workers=0)
    processor = load_processor(model)
    LIMITS.apply(processor)
    costs: dict[str, list[float]] = {"processor": [], "ours": [], "ours_normalised": []}
    total = Counts()
    for index in range(rounds + 1):
        seconds, tokens = run_processor(processor, jsonl)
        our_seconds, normalising, counts = run_ours(loader, samples)
        if index > 0:
            costs["processor"].append(seconds / samples)
            costs["ours"].append(our_seconds / counts.samples)
            costs["ours_normalised"].append((our_seconds + normalising) / counts.samples)
            total += counts
    tokens_per_sample = tokens / samples
    return {
        "samples": samples,
        "tokens_per_sample": tokens_per_sample,
        **{name: _rates(values, tokens_per_sample) for name, values in costs.items()},
        **{
            f"{name}_over_processor_speed": _ratio(costs["processor"], costs[name])
            for name in ("ours", "ours_normalised")
        },
        "packing_efficiency": total.tokens / total.capacity,
    }


def _ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def _rates(costs: list[float], tokens: float) -> dict[str, float]:
    cost = statistics.median(costs)
    return {
        "samples_per_second": 1 / cost,
        "tokens_per_second": tokens / cost,
    }


def tiny_model(folder: Path) -> Path:
    """Write a config and a processor with the real models' patch size."""
    folder.mkdir()
    tiny = tiny_config(vision=REAL_PATCHES)
    write_processor(folder, tiny["vision_config"])
    (folder / "config.json").write_text(json.dumps(tiny), encoding="utf-8")
    return folder


def main() -> None:
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = args.hf_model or tiny_model(folder / "model")
        results = {
            kind: measure(
                model,
                write_samples(folder, args.samples, kind),
                args.samples,
                args.rounds,
                args.seq_length,
            )
            for kind in ("image", "text")
        }
    report(results, args)


def arguments(text: str | None) -> argparse.Namespace:
    """Parse the flags of this benchmark and of `formats.py`, and keep to one thread."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0] if text else None)
    parser.add_argument("--hf-model", type=Path, help="checkpoint with config and processor")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--output", type=Path, help="write the JSON here, too")
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return parser.parse_args()


def report(results: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the results as JSON, and write them where the flags say."""
    text = json.dumps({"threads": 1, "seq_length": args.seq_length, **results}, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
