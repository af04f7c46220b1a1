"""Settings of losses over several sequences. Imports no torch, so that command lines are fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mcore_qwen3vl.errors import BadInput

Kind = Literal["sigmoid", "hinge", "ipo"]


@dataclass(frozen=True)
class Preference:
    """The kind of loss over pairs, and its settings.

    Attributes:
        kind: the loss; see :mod:`mcore_qwen3vl.objectives.preference`.
        beta: the strength with which the policy is kept near the reference.
        label_smoothing: share of the pairs that are assumed to be labelled the wrong way round;
            for ``sigmoid`` only.
        rpo_alpha: weight of the chosen answer's negative log-likelihood.

    Raises:
        BadInput: a value is out of range, or does not apply to the loss.
    """

    kind: Kind = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise BadInput(
                f"dpo_loss is {self.kind!r}; it must be one of {', '.join(get_args(Kind))}."
            )
        if not self.beta > 0:
            raise BadInput(f"dpo_beta is {self.beta:g}: it must be above 0.")
        if not 0 <= self.label_smoothing < 0.5:
            raise BadInput(
                f"dpo_label_smoothing is {self.label_smoothing:g}; it must be a share from 0 to "
                "below 0.5."
            )
        if self.label_smoothing and self.kind != "sigmoid":
            raise BadInput(
                f"dpo_label_smoothing belongs to the sigmoid loss, and dpo_loss is {self.kind}: "
                "drop one of them."
            )
        if not self.rpo_alpha >= 0:
            raise BadInput(f"rpo_alpha is {self.rpo_alpha:g}: it must not be below 0.")


@dataclass(frozen=True)
class Contrastive:
    """Settings of the contrastive loss; see :mod:`mcore_qwen3vl.objectives.contrastive`.

    Attributes:
        temperature: number that cosines are divided by.
        dimensions: numbers of values that embeddings are cut to (Matryoshka); empty: not cut.

    Raises:
        BadInput: a value is out of range.
    """

    temperature: float = 0.05
    dimensions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise BadInput(f"temperature is {self.temperature:g}: it must be above 0.")
        if any(dimension < 1 for dimension in self.dimensions):
            raise BadInput(f"matryoshka_dims is {self.dimensions}: each must be at least 1.")
