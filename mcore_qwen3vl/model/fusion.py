"""Fusion of visual features into the language model: at their placeholders, and by DeepStack.

The host knows the destination of each feature row before the forward pass. So fusing is an index
copy (and DeepStack an index add) with a fixed number of rows: no mask, no host sync.

The gradient that reaches the features on a rank is that of the rows which the rank holds. Ranks
that hold different rows (CP, SP) have different parts of it, to be summed; ranks that hold the same
rows (TP without SP) have equal copies. :mod:`mcore_qwen3vl.model.vision` relies on exactly this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_qwen3vl.model.inputs import to_device


@dataclass(frozen=True)
class FusionPlan:
    """The n features whose placeholders this rank holds, and their places."""

    rows: Tensor  # (n,) int64: rows of the (N, H) features
    destination: Tensor  # (n,) int64: rows of the (s_local * B, H) hidden states

    def select(self, features: Tensor) -> Tensor:
        """Select the feature rows that this rank consumes: (N, H) -> (n, H)."""
        return features.index_select(0, self.rows)


def plan_fusion(
    token_index: Tensor | None,
    local_positions: Tensor,
    *,
    seq_len: int,
    batch_size: int,
    device: torch.device | str = "cpu",
) -> FusionPlan:
    """Find, on the host, the placeholders among the positions that this rank holds.

    Args:
        token_index: (N,) int64 on the CPU, ``VisualInputs.token_index``; None for text only.
        local_positions: (s_local,) int64 on the CPU, global positions in local order.
        seq_len: S of the full sequence.
    """
    if token_index is None:
        token_index = torch.empty(0, dtype=torch.int64)
    local_of = torch.full((seq_len,), -1)  # global position -> local position
    local_of[local_positions] = torch.arange(len(local_positions))
    batch, local = token_index // seq_len, local_of[token_index % seq_len]  # (N,)
    rows = torch.nonzero(local >= 0).squeeze(1)
    destination = local[rows] * batch_size + batch[rows]
    return FusionPlan(to_device(rows, device), to_device(destination, device))


def fuse(embeddings: Tensor, features: Tensor, plan: FusionPlan) -> Tensor:
    """Replace the placeholders' embeddings by the visual features.

    Args:
        embeddings: (s_local, B, H) text embeddings on this rank.
        features: (N, H) features of the whole micro-batch; N may be 0.

    Returns:
        (s_local, B, H). The features stay in the graph even when no row is local, so that the
        vision tower's backward, and the collectives in it, run on every rank.
    """
    flat = embeddings.reshape(-1, embeddings.shape[-1])  # (s_local * B, H)
    local = plan.select(features).to(flat.dtype)
    return flat.index_copy(0, plan.destination, local).view_as(embeddings)


def add_features(hidden: Tensor, features: Tensor, destination: Tensor) -> Tensor:
    """Add visual features to the output (s_local, B, H) of a decoder layer, as DeepStack does.

    Source: Meng et al., "DeepStack", 2024; HF ``Qwen3VLTextModel._deepstack_process``.

    Args:
        features: (n, H) rows of one layer's features, from :meth:`FusionPlan.select`.
        destination: (n,) ``FusionPlan.destination``.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])  # (s_local * B, H)
    return flat.index_add(0, destination, features.to(flat.dtype)).view_as(hidden)
