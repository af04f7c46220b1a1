"""Assignment of frames to the ranks of a TP x CP group, computed on the host.

The unit is the frame, because attention in the vision tower never leaves one. So a video can be
divided between its frames, and a frame's features do not depend on which rank encodes it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """One rank's part of the work, and the order of the gathered features. All on the host."""

    frame_patches: tuple[int, ...]  # patches of each frame this rank encodes; empty: none
    patch_rows: Tensor  # (P_local,) int64: rows of the (P, ...) inputs
    padded_features: int  # rows that every rank contributes to the gather; at least 1
    order: Tensor  # (N,) int64: row of the (ranks * padded_features, ...) gather for each feature


def assign_frames(frame_patches: np.ndarray, ranks: int) -> np.ndarray:
    """Assign each frame to a rank: the largest first, to the rank with the least work so far.

    Args:
        frame_patches: (F,) number of patches in each frame.

    Returns:
        (F,) rank that encodes each frame, the same on every rank. The largest load is at most 4/3
        of the optimum (Graham, "Bounds on multiprocessing timing anomalies", 1969).
    """
    owners = np.zeros(len(frame_patches), dtype=np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    for frame in np.argsort(-frame_patches, kind="stable"):
        load, rank = loads[0]
        owners[frame] = rank
        heapq.heapreplace(loads, (load + int(frame_patches[frame]), rank))
    return owners


def share_frames(frame_patches: Tensor, merge_unit: int, ranks: int, rank: int) -> Share:
    """Divide F frames among `ranks` and describe the part of `rank`.

    Args:
        frame_patches: (F,) int64 on the CPU: number of patches in each frame; F may be 0.
        merge_unit: number of patches that merge into one feature.
    """
    patches = frame_patches.numpy()
    features = patches // merge_unit
    owners = assign_frames(patches, ranks)
    load = np.bincount(owners, weights=features, minlength=ranks).astype(np.int64)
    padded = max(int(load.max()), 1)  # a rank without a frame contributes one dummy feature

    # Each rank keeps its frames in their original order; the gather puts them rank by rank.
    by_owner = np.argsort(owners, kind="stable")
    start = np.empty_like(features)
    start[by_owner] = _starts(features[by_owner])
    start += owners * padded - _starts(load)[owners]
    return Share(
        frame_patches=tuple(patches[owners == rank].tolist()),
        patch_rows=torch.from_numpy(np.flatnonzero(np.repeat(owners, patches) == rank)),
        padded_features=padded,
        order=torch.from_numpy(
            np.repeat(start - _starts(features), features) + np.arange(features.sum())
        ),
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each of consecutive pieces."""
    return np.cumsum(lengths) - lengths
