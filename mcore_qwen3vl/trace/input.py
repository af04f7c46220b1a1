"""A micro-batch from images and a prompt, as a user would ask them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.parity.batches import MicroBatch, Sample, micro_batch


def from_prompt(
    checkpoint: str | Path, prompt: str, images: Sequence[str | Path], *, multiple: int = 1
) -> MicroBatch:
    """Run the checkpoint's own processor and chat template.

    Args:
        checkpoint: Hugging Face checkpoint directory with tokenizer and processor.
        prompt: what the user says after the images.
        images: image files.
        multiple: what the length must be a multiple of, as the layout demands; the prompt is
            padded on the right. See :func:`mcore_qwen3vl.model.sequence.length_multiple`.

    Raises:
        BadInput: an image cannot be read.
    """
    inputs = _process(checkpoint, prompt, [_open(path) for path in images])
    ids = inputs["input_ids"][0]
    counts = torch.ones(len(ids))
    counts[-1] = 0  # nothing follows
    sample = Sample(
        ids, inputs.get("pixel_values"), inputs.get("image_grid_thw"), None, None, counts
    )
    return micro_batch(Architecture.from_hf(checkpoint), [sample], multiple=multiple)


def _process(checkpoint: str | Path, prompt: str, images: list[Any]) -> dict[str, Any]:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    return dict(processor(text=text, images=images or None, return_tensors="pt"))


def _open(path: str | Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise BadInput(f"{path} cannot be read as an image: {error}. Give another file.") from None
