"""Prompts with images or videos, and responses, in the form that VERL's trainer gives a worker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.tiny.tiny_checkpoint import TINY

TEMPERATURE = 1.3
WIDTH = 9
"""The length to which responses are padded; prompts are padded to the longest."""


@dataclass(frozen=True)
class Sample:
    """A prompt (p,), a response (r,), and the processor's output for the media."""

    prompt: Tensor
    response: Tensor
    media: dict[str, Tensor]

    @property
    def ids(self) -> Tensor:
        return torch.cat([self.prompt, self.response])


def make(path: Path, media: str = "images") -> list[Sample]:
    """Make four samples of distinct lengths.

    Args:
        path: checkpoint folder.
        media: ``images``: two samples have one each, of distinct shapes; ``videos``: one sample has
            a video of two frames and one an image; ``text``: no sample has any.
    """
    architecture = Architecture.from_hf(path)
    generator = torch.Generator().manual_seed(7)
    grids: dict[str, list[tuple[str, tuple[int, int, int]] | None]] = {
        "images": [("image", (1, 4, 6)), None, ("image", (1, 6, 4)), None],
        "videos": [("video", (2, 4, 6)), None, ("image", (1, 8, 4)), None],
        "text": [None] * 4,
    }
    lengths = [(5, 6), (9, 4), (3, 3), (4, 7)]
    return [
        _sample(architecture, generator, *sizes, grid)
        for sizes, grid in zip(lengths, grids[media], strict=True)
    ]


def _sample(
    a: Architecture, generator: torch.Generator, prompt: int, response: int, media: Any
) -> Sample:
    def text(count: int) -> Tensor:
        return torch.randint(10, 90, (count,), generator=generator)

    ids = [text(prompt)]
    inputs: dict[str, Tensor] = {}
    if media is not None:
        kind, grid = media
        frames, rows, columns = grid
        merged = rows * columns // a.vision.spatial_merge_size**2
        token = a.image_token_id if kind == "image" else a.video_token_id
        for _ in range(frames):
            ids += [
                torch.tensor([TINY.special["<|vision_start|>"]]),
                torch.full((merged,), token),
            ]
            ids += [torch.tensor([TINY.special["<|vision_end|>"]]), text(2)]
        pixels = torch.randn(math.prod(grid), a.vision.patch_dim, generator=generator)
        suffix = "_videos" if kind == "video" else ""
        inputs = {f"pixel_values{suffix}": pixels, f"{kind}_grid_thw": torch.tensor([grid])}
    return Sample(torch.cat(ids), text(response), inputs)


def advantages(samples: list[Sample]) -> Tensor:
    """Draw advantages, (samples, WIDTH)."""
    return torch.randn(len(samples), WIDTH, generator=torch.Generator().manual_seed(1))


def batch(samples: list[Sample], expected: Any = None, **options: Any) -> Any:
    """Make a ``TensorDict`` and apply ``left_right_2_no_padding`` to it.

    Args:
        samples: samples of this batch.
        expected: Hugging Face's numbers, whose log-probabilities become ``old_log_probs``.
        options: VERL's non-tensor data; by default micro-batches of two, with entropies.
    """
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorData, NonTensorStack
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    longest = max(len(s.prompt) for s in samples)
    ids = torch.zeros(len(samples), longest + WIDTH, dtype=torch.long)
    mask = torch.zeros_like(ids)
    old = torch.zeros(len(samples), WIDTH)
    for row, sample in enumerate(samples):
        first, last = longest - len(sample.prompt), longest + len(sample.response)
        ids[row, first:last], mask[row, first:last] = sample.ids, 1
        if expected is not None:
            old[row, : len(sample.response)] = expected.log_probs[row][len(sample.prompt) - 1 :]
    data = TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "prompts": ids[:, :longest],
            "responses": ids[:, longest:],
            "response_mask": mask[:, longest:],
            "position_ids": torch.zeros(len(samples), 4, longest + WIDTH, dtype=torch.long),
            "advantages": advantages(samples),
            "old_log_probs": old,
            "values": torch.zeros_like(old),
            "returns": advantages(samples),
        },
        batch_size=len(samples),
    )
    data["multi_modal_inputs"] = NonTensorStack(*[NonTensorData(s.media) for s in samples])
    data = left_right_2_no_padding(data)
    options = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "temperature": TEMPERATURE,
        "calculate_entropy": True,
        "global_batch_size": len(samples),
        **options,
    }
    tensordict_utils.assign_non_tensor(data, **options)
    return data


def mine(data: Any, engine: Any) -> tuple[Any, slice]:
    """Return this DP rank's part of the batch, and which samples it has."""
    from verl.utils import tensordict_utils

    size, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    count = len(data) // size
    part = data if size == 1 else tensordict_utils.chunk_tensordict(data, size)[rank]
    return part, slice(rank * count, (rank + 1) * count)
