"""Which rank of a TP x CP group encodes which frames, decided on the host.

The frame is the unit: attention in the vision tower never leaves one, so a video can be divided
between its frames and a frame gives the same features whoever encodes it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """One rank's part of the work, and how the gathered parts form the whole. All on the host."""

    frame_patches: tuple[int, ...]  # patches of each frame this rank encodes; empty: none
    patch_rows: Tensor  # (P_local,) int64: rows of the (P, ...) inputs
    padded_features: int  # rows that every rank contributes to the gather; at least 1
    order: Tensor  # (N,) int64: row of the (ranks * padded_features, ...) gather for each feature


def assign_frames(frame_patches: np.ndarray, ranks: int) -> np.ndarray:
    """Give each frame an owner: the largest first, to the rank with the least work so far.

    Args:
        frame_patches: (F,) patches of each frame.
        ranks: size of the group.

    Returns:
        (F,) owner of each frame, the same on every rank. The largest load is at most 4/3 of the
        optimum (Graham, "Bounds on multiprocessing timing anomalies", 1969).
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
        frame_patches: (F,) int64 on the CPU; F may be 0.
        merge_unit: patches that merge into one feature.
        ranks: size of the group.
        rank: this rank's place in the group.
    """
    patches = frame_patches.numpy()
    features = patches // merge_unit
    owners = assign_frames(patches, ranks)
    load = np.bincount(owners, weights=features, minlength=ranks).astype(np.int64)
    padded = max(int(load.max()), 1)  # a rank without a frame contributes one dummy feature

    # A rank lines its frames up in their original order; gathered, they stand rank by rank.
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
    """Where each of consecutive pieces begins."""
    return np.cumsum(lengths) - lengths
