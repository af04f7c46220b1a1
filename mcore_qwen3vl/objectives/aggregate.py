"""Reduction of the losses of tokens to one number, in VERL's modes and under VERL's names."""

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
    """Reduce the values of tokens to one number.

    - ``token-mean``: the mean over all tokens (Yu et al., "DAPO", 2025, section 3.3).
    - ``seq-mean-token-sum``: the mean over sequences of each one's sum.
    - ``seq-mean-token-mean``: the mean over sequences of each one's mean (Shao et al.,
      "DeepSeekMath", 2024, GRPO).
    - ``seq-mean-token-sum-norm``: the mean over sequences of each one's sum, divided by a length
      that is the same for all (Liu et al., "Understanding R1-Zero-Like Training", 2025, Dr. GRPO).

    If a global batch is divided over micro-batches or ranks, pass `tokens` or `sequences` of the
    whole batch: the results of the parts then add up to the result of the whole.

    Args:
        values: (B, T) float, one a token.
        mask: (B, T) bool or 0 and 1: the tokens of the answer.
        mode: one of the modes above.
        tokens: number of tokens in the mask, for ``token-mean``; None: count those of `mask`.
        sequences: number of sequences with a token in the mask, for the other modes; None: count
            those of `mask`.
        horizon: length that ``seq-mean-token-sum-norm`` divides by; None: T, padding included, as
            in VERL.

    Returns:
        A scalar with a gradient for `values` inside the mask; 0 if the mask is empty.

    Raises:
        BadInput: `mode` is not known.
    """
    if mode not in get_args(Aggregation):
        raise BadInput(
            f"loss_agg_mode is {mode!r}; it must be one of {', '.join(get_args(Aggregation))}."
        )
    mask = mask.bool()
    counts = mask.sum(-1)  # (B,)
    kept = values.where(mask, 0.0)  # not a product: values outside may be infinite
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
