"""From a loss for each token to one number, by the names that verl gives the ways to do it."""

from __future__ import annotations

from typing import Literal, assert_never, get_args

from torch import Tensor

from mcore_qwen3vl.errors import BadInput

Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: Aggregation = "token-mean",
    *,
    tokens: Tensor | float | None = None,
    sequences: Tensor | float | None = None,
    horizon: float | None = None,
) -> Tensor:
    """Sums over tokens and sequences, divided once.

    - ``token-mean``: every token counts the same (Yu et al., "DAPO", 2025, section 3.3).
    - ``seq-mean-token-sum``: every sequence's sum.
    - ``seq-mean-token-mean``: every sequence the same (Shao et al., "DeepSeekMath", 2024, GRPO).
    - ``seq-mean-token-sum-norm``: every sequence's sum over a length that is the same for all
      (Liu et al., "Understanding R1-Zero-Like Training", 2025, Dr. GRPO).

    A global batch that is divided over micro-batches or ranks gives `tokens` or `sequences` of all
    of it; the sum of what the parts return is then what the whole would.

    Args:
        values: (B, T) float, one a token.
        mask: (B, T) bool or 0 and 1: the tokens of the answer.
        mode: how.
        tokens: number of masked tokens, for ``token-mean``; None: those of `mask`.
        sequences: with a token in the mask, for the other modes; None: those of `mask`.
        horizon: tokens that ``seq-mean-token-sum-norm`` divides by; None: T, padding included, as
            verl's.

    Returns:
        A scalar with a gradient for `values` inside the mask; 0 where nothing is masked.

    Raises:
        BadInput: `mode` is not known.
    """
    if mode not in get_args(Aggregation):
        raise BadInput(
            f"loss_agg_mode is {mode!r}; it must be one of {', '.join(get_args(Aggregation))}."
        )
    mask = mask.bool()
    counts = mask.sum(-1)  # (B,)
    kept = values.where(mask, 0.0)  # not a product: outside there may be infinities
    if mode == "token-mean":
        return kept.sum() / (counts.sum().clamp(min=1) if tokens is None else tokens)
    if sequences is None:
        sequences = (counts > 0).sum().clamp(min=1)
    of_sequences = kept.sum(-1)
    match mode:
        case "seq-mean-token-sum":
            pass
        case "seq-mean-token-mean":
            of_sequences = of_sequences / counts.clamp(min=1)
        case "seq-mean-token-sum-norm":
            of_sequences = of_sequences / (values.shape[-1] if horizon is None else horizon)
        case _:
            assert_never(mode)
    return of_sequences.sum() / sequences
