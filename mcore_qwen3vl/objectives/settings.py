"""Settings of losses over several sequences. Imports no torch, so that command lines are fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from mcore_qwen3vl.errors import BadInput

DpoKind = Literal["sigmoid", "hinge", "ipo"]
Kind = DpoKind | Literal["simpo", "orpo"]
KINDS: tuple[Kind, ...] = ("sigmoid", "hinge", "ipo", "simpo", "orpo")

DEFAULTS: dict[str, dict[str, Any]] = {
    "simpo": {"beta": 2.0, "gamma": 1.0},  # SimPO's authors, section 4 and appendix B
    "orpo": {"rpo_alpha": 1.0},  # ORPO's equation 6
}
"""The settings of a kind that differ from those of :class:`Preference`."""

Divergence = Literal["forward", "reverse", "jsd"]
"""The divergences of a student; see :mod:`mcore_qwen3vl.objectives.losses`."""

TEACHER_TOP_K = 64
"""The usual number of a teacher's likeliest tokens that a student learns from."""


@dataclass(frozen=True)
class Preference:
    """The kind of loss over pairs, and its settings.

    Attributes:
        kind: the loss; see :mod:`mcore_qwen3vl.objectives.losses`.
        beta: the strength with which the policy is kept near the reference; without a reference,
            the scale of the rewards (``simpo``) or the weight of the odds ratio (``orpo``).
        label_smoothing: share of the pairs that are assumed to be labelled the wrong way round;
            for ``sigmoid`` only.
        rpo_alpha: weight of the chosen answer's negative log-likelihood.
        gamma: the margin that a pair's rewards should have; for ``simpo`` only.

    Raises:
        BadInput: a value is out of range, or does not apply to the loss.
    """

    kind: Kind = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float = 0.0
    gamma: float = 0.0

    @property
    def loss(self) -> str:
        """The value of ``--loss``, and the loss's name in the log."""
        return "dpo" if self.kind in get_args(DpoKind) else self.kind

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return self.loss == "dpo"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}.")
        _require("beta", self.beta, self.beta > 0, "above 0")
        small = 0 <= self.label_smoothing < 0.5
        _require("dpo_label_smoothing", self.label_smoothing, small, "a share from 0 to below 0.5")
        if self.label_smoothing and self.kind != "sigmoid":
            raise BadInput(
                f"dpo_label_smoothing belongs to the sigmoid loss, and the loss is {self.kind}: "
                "drop one of them."
            )
        for name, value in (("rpo_alpha", self.rpo_alpha), ("simpo_gamma", self.gamma)):
            _require(name, value, value >= 0, "0 or above")
        if self.gamma and self.kind != "simpo":
            raise BadInput(f"simpo_gamma belongs to simpo, and the loss is {self.kind}: drop it.")


@dataclass(frozen=True)
class Kto:
    """Settings of the loss of labelled answers; see :mod:`mcore_qwen3vl.objectives.losses`.

    Attributes:
        beta: the strength with which the policy is kept near the reference.
        desirable_weight: weight of the losses of wanted answers.
        undesirable_weight: weight of the losses of unwanted answers.

    Raises:
        BadInput: a value is out of range.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _require(name, value, value > 0, "above 0")


@dataclass(frozen=True)
class Distillation:
    """Settings of distillation; see :mod:`mcore_qwen3vl.objectives.losses`.

    Attributes:
        divergence: the kind of divergence of the student from the teacher.
        beta: the teacher's share in the mixture, above 0 and below 1; read for ``jsd`` only.
        temperature: number that the logits of both are divided by. The divergence is multiplied by
            its square, so that its gradients keep their size (Hinton et al. 2015).
        alpha: share of the cross entropy, at temperature 1, in the loss.

    Raises:
        BadInput: a value is out of range.
    """

    divergence: Divergence = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        inside = (
            "above 0 and below 1. For GKD's 0 and 1, choose the divergences forward and reverse"
        )
        _require("distill_beta", self.beta, 0 < self.beta < 1, inside)
        _require("distill_temperature", self.temperature, self.temperature > 0, "above 0")
        _require("distill_alpha", self.alpha, 0 <= self.alpha < 1, "a share from 0 to below 1")


def _require(name: str, value: float, holds: bool, what: str) -> None:
    """Raise BadInput, which says what the value must be, unless it `holds`."""
    if not holds:
        raise BadInput(f"{name} is {value:g}: it must be {what}.")


def check_top_k(flag: str, k: int, vocab_size: int) -> None:
    """Raise BadInput unless `k`, which `flag` gives, is from 1 to `vocab_size`."""
    if not 1 <= k <= vocab_size:
        raise BadInput(
            f"{flag} is {k}; it must be from 1 to the {vocab_size} tokens of the vocabulary."
        )
