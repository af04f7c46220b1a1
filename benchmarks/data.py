"""Data throughput per worker, against the cost of Hugging Face's processor alone.

    python benchmarks/data.py [--hf-model DIR] [--samples 200] [--output data.json]

Questions without images are read as JSONL. The same questions about photos are read as JSONL, as a
JSON array in LLaVA's format, as Parquet with the images in it, as a Hugging Face dataset from
``save_to_disk`` and as a WebDataset.

Both run in one process on one thread, on the same samples, in turns. Costs are CPU time, which a
busy machine disturbs least, and the ratio is taken round by round. Between machines, compare only
the ratios:

- ``processor``: HF's processor called on each sample (chat template, images, tokens), nothing else
- ``ours``: what one data worker does, from a record to packed batches with labels, position ids and
  indexed images, whose pixels are bytes
- ``ours_normalised``: the same, plus the normalisation of pixels as the processor returns them, on
  this CPU; in training the model does that on its device

Without ``--hf-model`` a locally made byte-level tokenizer and image processor are used, with the
real models' patch size. Images are 64 to 1024 tokens for both.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers.image_utils import load_image

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import Counts, DataConfig, Loader, MediaLimits, Source, load_processor
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.tiny import tiny_config, write_processor

REAL_PATCHES = {"patch_size": 16}
LIMITS = MediaLimits(image_min_pixels=64 * 32**2, image_max_pixels=1024 * 32**2)
SPEAKERS = {"user": "human", "assistant": "gpt"}


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


def write_formats(folder: Path, jsonl: Path) -> dict[str, Path]:
    """Write the records of a file in every other format, and return the paths by name."""
    records = [json.loads(line) for line in jsonl.read_text(encoding="utf-8").splitlines()]
    names = {"llava_json": "a.json", "parquet": "a.parquet", "save_to_disk": "saved"}
    kinds = {kind: folder / name for kind, name in names.items()}
    llava = [
        {
            "image": record["images"][0],
            "conversations": [
                {"from": SPEAKERS[turn["role"]], "value": turn["content"]}
                for turn in record["messages"]
            ],
        }
        for record in records
    ]
    kinds["llava_json"].write_text(json.dumps(llava, indent=2), encoding="utf-8")
    with_bytes = [
        {**record, "images": [(folder / name).read_bytes() for name in record["images"]]}
        for record in records
    ]
    pq.write_table(pa.Table.from_pylist(with_bytes), kinds["parquet"], row_group_size=100)
    turns = List({"role": Value("string"), "content": Value("string")})
    columns = {
        "messages": [record["messages"] for record in records],
        "images": [[str(folder / name) for name in record["images"]] for record in records],
    }
    features = Features({"messages": turns, "images": List(ImageFeature())})
    Dataset.from_dict(columns, features=features).save_to_disk(kinds["save_to_disk"])
    kinds["webdataset"] = folder / "tars"
    kinds["webdataset"].mkdir()
    with tarfile.open(kinds["webdataset"] / "0.tar", "w") as tar:
        for index, record in enumerate(with_bytes):
            named = json.dumps({**record, "images": ["jpg"]}).encode()
            for suffix, content in (("json", named), ("jpg", record["images"][0])):
                info = tarfile.TarInfo(f"{index:06}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return kinds


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


def run_loader(loader: Loader, samples: int) -> tuple[float, float, Counts]:
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


def measure(
    model: Path, jsonl: Path, path: Path, *, seq_length: int, samples: int, rounds: int
) -> dict[str, Any]:
    """Run Hugging Face's processor and our loader in turns, and return medians of the rounds.

    A first round for warming up is left out.

    The processor reads the samples as `jsonl`, and we read them as `path`.
    """
    architecture = Architecture.from_hf(model)
    config = DataConfig(seq_length=seq_length, packing=True, media_limits=LIMITS)
    loader = Loader([Source(path)], architecture, load_processor(model), config, num_workers=0)
    processor = load_processor(model)
    LIMITS.apply(processor)
    costs: dict[str, list[float]] = {"processor": [], "ours": [], "ours_normalised": []}
    total = Counts()
    for index in range(rounds + 1):
        seconds, tokens = run_processor(processor, jsonl)
        our_seconds, normalising, counts = run_loader(loader, samples)
        if index > 0:  # the first round warms up
            costs["processor"].append(seconds / samples)
            costs["ours"].append(our_seconds / counts.samples)
            costs["ours_normalised"].append((our_seconds + normalising) / counts.samples)
            total += counts
    tokens_per_sample = tokens / samples
    result: dict[str, Any] = {"samples": samples, "tokens_per_sample": tokens_per_sample}
    for name, values in costs.items():
        rate = 1 / statistics.median(values)
        result[name] = {"samples_per_second": rate, "tokens_per_second": tokens_per_sample * rate}
    for name in ("ours", "ours_normalised"):
        ratios = [a / b for a, b in zip(costs["processor"], costs[name], strict=True)]
        summary = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        result[f"{name}_over_processor_speed"] = summary
    return {**result, "packing_efficiency": total.tokens / total.capacity}


def write_config_and_processor(folder: Path) -> Path:
    """Write a config and a processor with the real models' patch size."""
    folder.mkdir()
    tiny = tiny_config(vision=REAL_PATCHES)
    write_processor(folder, tiny["vision_config"])
    (folder / "config.json").write_text(json.dumps(tiny), encoding="utf-8")
    return folder


def main() -> None:
    """Measure all kinds of data, and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hf-model", type=Path, help="checkpoint with config and processor")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--output", type=Path, help="write the JSON here, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = args.hf_model or write_config_and_processor(folder / "model")
        text = write_samples(folder, args.samples, "text")
        images = write_samples(folder, args.samples, "image")
        measured = partial(
            measure, model, seq_length=args.seq_length, samples=args.samples, rounds=args.rounds
        )
        results = {"text": measured(text, text)}
        for name, path in {"jsonl": images, **write_formats(folder, images)}.items():
            results[name] = measured(images, path)
    shown = json.dumps({"threads": 1, "seq_length": args.seq_length, **results}, indent=2)
    print(shown)
    if args.output:
        args.output.write_text(shown + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
