"""A micro-batch from a user's images, videos and prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.verify.parity.batches import MicroBatch, Sample, micro_batch


def from_prompt(
    checkpoint: str | Path,
    prompt: str,
    images: Sequence[str | Path] = (),
    videos: Sequence[str | Path] = (),
    *,
    multiple: int = 1,
) -> MicroBatch:
    """Make a micro-batch with the checkpoint's own processor and chat template.

    Args:
        checkpoint: Hugging Face checkpoint directory with tokenizer and processor.
        prompt: the user's text after the images and videos, or around their tags; see
            :func:`mcore_qwen3vl.generation.prompts.user_turns`.
        images: image files.
        videos: video files.
        multiple: number that the layout requires the length to be a multiple of; the prompt is
            padded on the right. See :func:`mcore_qwen3vl.model.sequence.length_multiple`.

    Raises:
        BadInput: an image or video cannot be read, or tags and media do not match.
    """
    # Imported here, because megatron must not be imported before the CPU backend is installed.
    from mcore_qwen3vl.data import load_processor
    from mcore_qwen3vl.generation.prompts import process, user_turns

    processor = load_processor(checkpoint)
    inputs = process(processor, user_turns([prompt], images, videos))
    ids = inputs["input_ids"][0]
    counts = torch.ones(len(ids))
    counts[-1] = 0  # no token follows the last one
    sample = Sample(
        ids,
        inputs.get("pixel_values"),
        inputs.get("image_grid_thw"),
        inputs.get("pixel_values_videos"),
        inputs.get("video_grid_thw"),
        counts,
    )
    return micro_batch(Architecture.from_hf(checkpoint), [sample], multiple=multiple)
