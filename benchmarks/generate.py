"""Prefill and per-token time of generation against Hugging Face's, on one CPU thread.

``python benchmarks/generate.py`` prints JSON. Both run in one process on the same weights and
inputs, in turn, and their CPU time is measured. A ratio is taken within each repetition, and the
median of the ratios reported, so that it holds on a busy machine. For each number of images there
is a text prompt of the same length: the cost of a token after prefill depends on how many tokens
the cache holds, not on how many are images. The narrow model shows what Python costs per layer, the
wide one how much that is beside arithmetic.
"""

from __future__ import annotations

import json
import statistics
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
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import initialize
from mcore_qwen3vl.tiny import write_tiny_checkpoint

MODELS = {
    "narrow": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8},
    "wide": {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 4},
}
IMAGES = {"narrow": (0, 4, 12), "wide": (0, 4)}
NEW_TOKENS = 16
REPETITIONS = 3


def main() -> None:
    cpu.install()
    from mcore_qwen3vl.console import quiet_libraries

    quiet_libraries()
    rows = []
    for name, text in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_tiny_checkpoint(Path(folder) / "hf", text=text)
            (found,) = run_layout(measure, 1, path, IMAGES[name], timeout=1800)
        rows += [{"model": name, **row} for row in found]
    report = {
        "what": "processor seconds, float32, batch 1, one CPU thread, median of the repetitions",
        "new_tokens": NEW_TOKENS,
        "repetitions": REPETITIONS,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
    }
    print(json.dumps(report, indent=2))


def measure(path: Path, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    from mcore_qwen3vl.converters.live.load import load_hf
    from mcore_qwen3vl.generation.decoding import Sampler, decode
    from mcore_qwen3vl.generation.prompts import prompts_from_inputs
    from mcore_qwen3vl.model.qwen3vl import build_chunks

    initialize(Layout())
    architecture = Architecture.from_hf(path)
    (ours,) = build_chunks(architecture, Layout())
    load_hf(ours, path)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(path)
    sampler = Sampler(transformers.GenerationConfig())

    rows = []
    for images in counts:
        inputs = prompt(processor, images)
        plain = {
            "input_ids": torch.full_like(inputs["input_ids"], 65),
            "attention_mask": inputs["attention_mask"],
        }

        def mcore(given: Any) -> Callable[[int], Any]:
            prompts = prompts_from_inputs(architecture, given)
            return lambda new: decode(ours, prompts, sampler, max_new_tokens=new, stop=set(), pad=0)

        def hugging_face(new: int, given: Any = inputs) -> Any:
            limits = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            return theirs.generate(**given, **limits)

        runs = {"mcore": mcore(inputs), "text": mcore(plain), "hf": hugging_face}
        rows.append(
            {"images": images, "prompt_tokens": inputs["input_ids"].shape[1], **times(runs)}
        )
    return rows


def times(runs: dict[str, Callable[[int], Any]]) -> dict[str, float]:
    """Return median seconds of prefill with the first token and of each further one, and ratios."""
    seen: dict[str, list[float]] = {}
    for _ in range(REPETITIONS):
        for name, run in runs.items():
            one, many = (seconds(run, new) for new in (1, NEW_TOKENS))
            seen.setdefault(f"{name}_prefill", []).append(one)
            seen.setdefault(f"{name}_per_token", []).append((many - one) / (NEW_TOKENS - 1))
    for ratio, above, below in (
        ("prefill_vs_hf", "mcore_prefill", "hf_prefill"),
        ("per_token_vs_hf", "mcore_per_token", "hf_per_token"),
        ("per_token_vs_text_of_same_length", "mcore_per_token", "text_per_token"),
    ):
        seen[ratio] = [a / b for a, b in zip(seen[above], seen[below], strict=True)]
    return {name: statistics.median(values) for name, values in seen.items()}


def seconds(run: Callable[[int], Any], new: int) -> float:
    start = time.process_time()
    run(new)
    return time.process_time() - start


def prompt(processor: Any, images: int) -> Any:
    """Return the inputs of a question about `images` random pictures."""
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
