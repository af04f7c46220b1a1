"""A config, a tokenizer and data for a run of a published size without its weights.

They are for runs whose results do not matter, such as those on the pretended device.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from mcore_qwen3vl.tiny.processor import TINY, write_processor

_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_MOST_PIXELS = 1 << 22  # the largest image; large enough that none is shrunk


def write_stand_in(
    config: Path, out: Path, *, layers: int | None = None, vision_blocks: int | None = None
) -> None:
    """Write a model directory without weights."""
    fields: dict[str, Any] = json.loads(config.read_text("utf-8"))
    text, vision = fields["text_config"], fields["vision_config"]
    for name, token in _TOKENS.items():
        fields[name] = TINY.special[token]  # nothing else in the vocabulary matters
    text["num_hidden_layers"] = layers or text["num_hidden_layers"]
    if vision_blocks is not None:
        vision["depth"] = vision_blocks
        vision["deepstack_visual_indexes"] = list(range(len(vision["deepstack_visual_indexes"])))
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(fields, indent=1), "utf-8")
    write_processor(out, vision)
    file = out / "processor_config.json"
    processor = json.loads(file.read_text("utf-8"))
    processor["image_processor"]["size"] = {"shortest_edge": 4096, "longest_edge": _MOST_PIXELS}
    file.write_text(json.dumps(processor), "utf-8")


def write_half_images(
    folder: Path,
    samples: int = 64,
    *,
    tokens: int = 512,
    images: int = 1,
    image_side: int = 16,
    token_pixels: int = 32,
    pairs: bool = False,
    labelled: bool = False,
) -> Path:
    """Write conversations whose tokens are half of images and half of text, by default.

    Args:
        tokens: approximate number of tokens in a sample.
        image_side: tokens along the side of an image.
        token_pixels: pixels along the side of a token.
        pairs: whether to write preference records, each of whose two sequences is such a sample.
        labelled: whether to write labelled records, every second of whose answers is wanted.

    Returns:
        The ``.jsonl`` file for ``--data-path``.
    """
    from PIL import Image

    folder.mkdir(parents=True)
    letters, lines = random.Random(0), []
    # The template and the question add 39 tokens, and two tokens bracket each image.
    answer_length = tokens - images * (image_side**2 + 2) - 39
    pixels = image_side * token_pixels
    for i in range(samples):
        Image.new("RGB", (pixels, pixels), (i % 256, 90, 160)).save(folder / f"{i}.png")
        answers = [
            "".join(letters.choice("abcdefghijklmnop ") for _ in range(answer_length))
            for _ in range(2 if pairs else 1)
        ]
        question = [{"type": "image", "image": f"{i}.png"}] * images
        question.append({"type": "text", "text": "What is it?"})
        asked = {"role": "user", "content": question}
        record: dict[str, Any] = {"messages": [asked]}
        if pairs:
            record["chosen"], record["rejected"] = answers
        else:
            record["messages"].append({"role": "assistant", "content": answers[0]})
        if labelled:
            record["label"] = i % 2 == 0
        lines.append(json.dumps(record))
    file = folder / "train.jsonl"
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file
