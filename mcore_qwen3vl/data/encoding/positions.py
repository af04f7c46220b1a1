"""Three-axis position ids (MRoPE), computed for a whole micro-batch at once on the host.

Source: HF ``Qwen3VLModel.get_rope_index``; Wang et al., "Qwen2-VL", 2024, section 2.1. Each text
token advances all axes by one. An image, or one frame of a video, has one temporal position, spans
its merged rows and columns on the other two axes, and advances the count by its longer side.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import check_one_frame


def mrope_position_ids(
    architecture: Architecture,
    input_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the position ids of a micro-batch, padded or packed.

    Args:
        input_ids: (B, S) integers; (1, S) when packed. All tensors are on the CPU.
        image_grid_thw: (images, 3) frames (always 1), rows and columns in patches, in the order
            of the images in `input_ids`.
        video_grid_thw: (videos, 3), in the same form. Timestamps stand between frames, so each
            frame of a video is a separate run of placeholders.
        attention_mask: (B, S), nonzero for tokens and 0 for padding, on either side.
        cu_seqlens: (samples + 1,) bounds of the packed samples, from 0 to S; positions restart at
            each. None: one sample a row.

    Returns:
        Positions (3, B, S) int64: temporal, row, column; 0 at padding. And the rope deltas
        (samples, 1) int64, which are added to a sample's token count to get its next position. Both
        are as in transformers 5; transformers 4.57 gives the same positions but 1 at padding, and
        deltas relative to S, padding included.

    Raises:
        BadInput: the runs of placeholders do not match the grids.
    """
    batch_size, seq_len = input_ids.shape
    lengths = np.full(batch_size, seq_len) if cu_seqlens is None else np.diff(cu_seqlens.numpy())
    if lengths.sum() != batch_size * seq_len:
        raise BadInput(
            f"cu_seqlens ends at {lengths.sum()}, but the packed batch has {batch_size * seq_len} "
            "tokens: it must cover the tail padding too."
        )
    tokens = input_ids.numpy().ravel()
    sample = np.repeat(np.arange(len(lengths)), lengths)
    if attention_mask is None:
        valid = np.arange(len(tokens))
    else:
        valid = np.flatnonzero(attention_mask.numpy())
    tokens, sample = tokens[valid], sample[valid]  # (T,)

    merge = architecture.vision.spatial_merge_size
    grids = [
        _Grids("image", tokens == architecture.image_token_id, sample, image_grid_thw, merge),
        _Grids("video", tokens == architecture.video_token_id, sample, video_grid_thw, merge),
    ]
    step = np.ones(len(tokens), np.int64)  # (T,) by how much each token advances the count
    for grid in grids:
        step[grid.tokens] = 0
        step[grid.starts] = np.maximum(grid.rows, grid.columns)
    counted = np.bincount(sample, step, len(lengths)).astype(np.int64)  # (samples,)
    count = np.cumsum(step) - step - (np.cumsum(counted) - counted)[sample]  # (T,)

    positions = np.zeros((3, batch_size * seq_len), np.int64)
    positions[:, valid] = count
    for grid in grids:
        positions[:, valid[grid.tokens]] = count[grid.starts][grid.run] + grid.offsets()
    deltas = counted - np.bincount(sample, minlength=len(lengths))
    return (
        torch.from_numpy(positions.reshape(3, batch_size, seq_len)),
        torch.from_numpy(deltas[:, None]),
    )


class _Grids:
    """The runs of one kind of placeholder, matched with the grids of that kind.

    Args:
        is_placeholder: (T,) bool.
        sample: (T,) the sample of each token; a run ends with its sample.
        grid_thw: (grids, 3) in patches; each of a grid's frames fills one run.
        merge: patches per feature along a side.
    """

    def __init__(
        self,
        kind: str,
        is_placeholder: np.ndarray,
        sample: np.ndarray,
        grid_thw: Tensor | None,
        merge: int,
    ) -> None:
        begins = is_placeholder.copy()
        begins[1:] &= ~(is_placeholder[:-1] & (sample[1:] == sample[:-1]))
        self.starts = np.flatnonzero(begins)  # (R,) first token of each run
        self.tokens = np.flatnonzero(is_placeholder)  # (M,)
        self.run = np.cumsum(begins[self.tokens]) - 1  # (M,) run of each placeholder
        lengths = np.bincount(self.run, minlength=len(self.starts))

        frames, rows, columns = (
            np.empty((3, 0), np.int64) if grid_thw is None else grid_thw.numpy().T
        )
        if kind == "image" and grid_thw is not None:
            check_one_frame(grid_thw)
        self.rows = np.repeat(rows // merge, frames)  # (R,) merged
        self.columns = np.repeat(columns // merge, frames)
        expected = self.rows * self.columns
        if len(expected) != len(lengths):
            raise BadInput(
                f"The prompt has {len(lengths)} runs of {kind} placeholders, but {kind}_grid_thw "
                f"describes {len(expected)} {kind} frames. Keep images and frames apart by their "
                "vision start and end tokens, as the chat template does, and truncate between "
                "messages only."
            )
        wrong = np.flatnonzero(lengths != expected)
        if len(wrong):
            i = wrong[0]
            raise BadInput(
                f"{kind} frame {i} has {lengths[i]} placeholders, but its grid of "
                f"{self.rows[i]} x {self.columns[i]} merged patches needs {expected[i]}. Truncate "
                "between messages, never inside an image or a frame."
            )

    def offsets(self) -> np.ndarray:
        """Return each placeholder's time (0), row and column within its frame, (3, M) int64."""
        within = np.arange(len(self.tokens)) - np.searchsorted(self.tokens, self.starts)[self.run]
        columns = self.columns[self.run]
        return np.stack([np.zeros_like(within), within // columns, within % columns])
