"""Prefill and per-token time of generation against Hugging Face's, on one CPU thread.

``python benchmarks/generate.py`` prints JSON. Both run in one process on the same weights and
inputs, alternating, and the best of several repetitions counts, so that the ratios hold on a busy
machine too. For each number of images there is a text prompt of the same length: what a token
costs after prefill depends on how many tokens the cache holds, not on how many are images.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import Layout, initialize
from mcore_qwen3vl.tiny import write_tiny_checkpoint

IMAGES = (0, 1, 4, 12)
NEW_TOKENS = 24
REPETITIONS = 4
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "max_position_embeddings": 8192,
}


def main() -> None:
    cpu.install()
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_checkpoint(Path(folder) / "hf", text=TEXT)
        (rows,) = run_layout(measure, 1, path, timeout=1800)
    report = {
        "what": "seconds, float32, batch 1, one CPU thread, best of the repetitions",
        "new_tokens": NEW_TOKENS,
        "repetitions": REPETITIONS,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
    }
    print(json.dumps(report, indent=2))


def measure(path: Path) -> list[dict[str, Any]]:
    from mcore_qwen3vl.converters.live import load_hf
    from mcore_qwen3vl.generation.generate import decode
    from mcore_qwen3vl.generation.prompts import prompts_from_inputs
    from mcore_qwen3vl.generation.sampling import Sampler
    from mcore_qwen3vl.parity.build import build_chunks

    initialize(Layout())
    architecture = Architecture.from_hf(path)
    (ours,) = build_chunks(architecture, Layout())
    load_hf(ours, path)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(path)
    sampler = Sampler(transformers.GenerationConfig())

    rows = []
    for images in IMAGES:
        inputs = prompt(processor, images)
        prompts = prompts_from_inputs(architecture, inputs)
        plain_inputs = {
            "input_ids": torch.full_like(inputs["input_ids"], 65),
            "attention_mask": inputs["attention_mask"],
        }
        plain = prompts_from_inputs(architecture, plain_inputs)

        def mcore(new: int, given: Any = prompts) -> Any:
            return decode(ours, given, sampler, max_new_tokens=new, stop=set(), pad=0)

        def text(new: int, given: Any = plain) -> Any:
            return decode(ours, given, sampler, max_new_tokens=new, stop=set(), pad=0)

        def hugging_face(new: int, given: Any = inputs) -> Any:
            limits = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            return theirs.generate(**given, **limits)

        times = best_of({"mcore": mcore, "text": text, "hf": hugging_face})
        rows.append(
            {
                "images": images,
                "prompt_tokens": inputs["input_ids"].shape[1],
                **{f"{name}_prefill": first for name, (first, _) in times.items()},
                **{f"{name}_per_token": each for name, (_, each) in times.items()},
                "prefill_vs_hf": times["mcore"][0] / times["hf"][0],
                "per_token_vs_hf": times["mcore"][1] / times["hf"][1],
                "per_token_vs_text_of_same_length": times["mcore"][1] / times["text"][1],
            }
        )
    return rows


def best_of(runs: dict[str, Callable[[int], Any]]) -> dict[str, tuple[float, float]]:
    """Seconds of prefill with the first token, and of each further one."""
    best = {name: [float("inf"), float("inf")] for name in runs}
    for _ in range(REPETITIONS):
        for name, run in runs.items():
            for i, new in enumerate((1, NEW_TOKENS)):
                start = time.perf_counter()
                run(new)
                best[name][i] = min(best[name][i], time.perf_counter() - start)
    return {name: (one, (many - one) / (NEW_TOKENS - 1)) for name, (one, many) in best.items()}


def prompt(processor: Any, images: int) -> Any:
    """A question about `images` random pictures."""
    generator = np.random.default_rng(images)
    pictures = [
        Image.fromarray(generator.integers(0, 256, (64, 64, 3), dtype=np.uint8))
        for _ in range(images)
    ]
    content = [{"type": "image"}] * images + [{"type": "text", "text": "Compare these."}]
    message = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(message, add_generation_prompt=True)
    return processor(text=[text], images=pictures or None, return_tensors="pt")


if __name__ == "__main__":
    main()
