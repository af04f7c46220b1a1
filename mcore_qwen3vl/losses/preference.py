"""``--loss dpo``, ``simpo`` and ``orpo``: a chosen answer against a rejected one.

The losses over pairs of a chosen and a rejected answer are DPO and its relatives, SimPO and ORPO.
Source: Rafailov et al., "Direct Preference Optimization", 2023. With the policy p, the reference p0
and s = (log p(chosen) - log p0(chosen)) - (log p(rejected) - log p0(rejected)), the losses are:

- ``sigmoid``: -log sigmoid(beta s); smoothed, Mitchell's "A note on DPO with noisy preferences",
  2023: -(1 - e) log sigmoid(beta s) - e log sigmoid(-beta s).
- ``hinge``: max(0, 1 - beta s). Zhao et al., "SLiC-HF", 2023, as Liu et al., "RSO",
  2023, normalise it.
- ``ipo``: (s - 1 / (2 beta))^2, where s has mean log-probabilities over an answer's tokens. Azar et
  al., "A General Theoretical Paradigm to Understand Learning from Human Preferences", 2023; the
  mean is as in TRL, on the authors' advice.

Two losses have no reference. With m, the mean log-probability of an answer's tokens, they are:

- ``simpo``: -log sigmoid(beta (m(chosen) - m(rejected)) - gamma). Meng et al., "SimPO", 2024.
- ``orpo``: -beta log sigmoid(o(chosen) - o(rejected)) with the log-odds o = m - log(1 - exp(m)).
  Hong et al., "ORPO", 2024, who add the loss of the chosen answer with weight 1.

To each of them, alpha times the chosen answer's mean negative log-likelihood over its tokens can be
added. Pang et al., "Iterative Reasoning Preference Optimization", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from mcore_qwen3vl.data.sidecar import Sidecar
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.lazy import Lazy
from mcore_qwen3vl.losses.answers import UNCUT_ANSWER, AnswerLoss, answer_log_probs, answers_step
from mcore_qwen3vl.losses.loss import require, without_none
from mcore_qwen3vl.losses.pairs import PairRecords, numbers_of_rewards
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.data.records import parse
    from mcore_qwen3vl.losses import passes, reduction, reference_file
    from mcore_qwen3vl.losses.reduction import Objective, Reduced
else:
    torch, F = map(Lazy, ("torch", "torch.nn.functional"))
    parse = Lazy("mcore_qwen3vl.data.records.parse")
    passes = Lazy("mcore_qwen3vl.losses.passes")
    reduction = Lazy("mcore_qwen3vl.losses.reduction")
    reference_file = Lazy("mcore_qwen3vl.losses.reference_file")

DpoKind = Literal["sigmoid", "hinge", "ipo"]
Kind = DpoKind | Literal["simpo", "orpo"]
KINDS: tuple[Kind, ...] = ("sigmoid", "hinge", "ipo", "simpo", "orpo")

DEFAULTS: dict[str, dict[str, Any]] = {
    "simpo": {"beta": 2.0, "gamma": 1.0},  # SimPO's authors, section 4 and appendix B
    "orpo": {"rpo_alpha": 1.0},  # ORPO's equation 6
}
"""The settings of a kind that differ from those of :class:`Preference`."""

_LABELS = {"simpo": "SimPO", "orpo": "ORPO"}


@dataclass(frozen=True)
class PreferenceRecords(PairRecords):
    """Preference records, of whose answers all tokens count."""

    needed_by = "--loss dpo, simpo and orpo need"

    @property
    def uncut(self) -> str:
        return UNCUT_ANSWER

    def describes(self, record: Mapping[str, Any]) -> bool:
        return parse.is_preference(record)


@dataclass(frozen=True)
class PairReferences(TaskInputs):
    """The reference's log-probabilities, for a loss with a reference."""

    log_probs: Tensor
    """float32: (pairs, 2) from a file, (2 * pairs,) from a model."""

    @classmethod
    def of_records(
        cls, records: Sequence[Any], assemble: Callable[..., Any], config: Any
    ) -> Self | None:
        return cls(torch.tensor([record.beside for record in records]))


@dataclass(frozen=True)
class PreferenceLoss(AnswerLoss):
    """The losses over pairs; None: the loss's own default."""

    dpo_loss: DpoKind | None = None
    """loss of a pair; default sigmoid"""
    dpo_label_smoothing: float | None = None
    """share of pairs that are labelled the wrong way round; default 0"""
    rpo_alpha: float | None = None
    """dpo, simpo: weight of the chosen answer's own loss, a mean over its tokens; default 0 (always
    1 with orpo)"""
    simpo_gamma: float | None = None
    """margin that the rewards of a pair should have; default 1.0"""

    names = ("dpo", "simpo", "orpo")
    help = "dpo, simpo or orpo on preference pairs"
    unit = "pairs"
    groups = True
    records = PreferenceRecords()
    made_up_records = MappingProxyType({"pairs": True})
    logged = ("dpo loss", "simpo loss", "orpo loss")

    @classmethod
    def owners(cls) -> Mapping[str, Collection[str]]:
        return {
            "dpo_loss": ("dpo",),
            "dpo_label_smoothing": ("dpo",),
            "rpo_alpha": ("dpo", "simpo"),
            "simpo_gamma": ("simpo",),
            "reference": ("dpo",),
            "reference_model": ("dpo",),
        }

    @property
    def pair_settings(self) -> Preference:
        """The settings of the formula; BadInput for a value out of range."""
        kind = self.dpo_loss if self.name == "dpo" else self.name
        values = {
            "kind": kind,
            "beta": self.beta,
            "label_smoothing": self.dpo_label_smoothing,
            "rpo_alpha": self.rpo_alpha,
            "gamma": self.simpo_gamma,
        }
        return Preference(**(DEFAULTS.get(kind or "", {}) | without_none(values)))

    @property
    def has_reference(self) -> bool:
        return self.pair_settings.has_reference

    def check_alone(self, run: RunSettings) -> None:
        if self.reference and self.name != "dpo":
            raise BadInput(
                f"--reference {self.reference} with --loss {self.name}, which has no reference: "
                "drop the flag."
            )

    def check_values(self) -> None:
        _ = self.pair_settings

    def sidecar(self, run: RunSettings, lora: LoraSettings) -> Sidecar | None:
        return reference_file.ReferenceFile() if self.reference_of(lora) == "file" else None

    def reads(self, run: RunSettings, lora: LoraSettings) -> dict[str, Any]:
        inputs = PairReferences if self.reference_of(lora) == "file" else None
        return {**super().reads(run, lora), "inputs": inputs}

    def summary(self, run: RunSettings, lora: LoraSettings) -> list[tuple[str, str]]:
        loss = self.pair_settings
        extra = f", gamma {loss.gamma:g}" if loss.gamma else ""
        extra += f", label smoothing {loss.label_smoothing:g}" if loss.label_smoothing else ""
        extra += f", chosen answer's own loss x {loss.rpo_alpha:g}" if loss.rpo_alpha else ""
        label = _LABELS.get(loss.kind, f"DPO ({loss.kind})")
        return [("loss", f"{label}, beta {loss.beta:g}{extra}"), self.reference_row(lora)]

    def objective(self, run: RunSettings, lora: LoraSettings) -> Objective:
        return preference_objective(self.pair_settings)

    def schedule(
        self, run: RunSettings, lora: LoraSettings, frozen: Any
    ) -> Callable[..., Any] | None:
        if self.reference_of(lora) not in ("adapter", "model"):
            return None
        return partial(
            passes.run_two_passes,
            first=answers_step(),
            within=frozen or passes.without_adapter,
            inputs=lambda batches, log_probs: map(PairReferences, log_probs),
        )


@dataclass(frozen=True)
class Preference:
    """The kind of loss over pairs, and its settings.

    Attributes:
        kind: the loss.
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
        require("beta", self.beta, self.beta > 0, "above 0")
        small = 0 <= self.label_smoothing < 0.5
        require("dpo_label_smoothing", self.label_smoothing, small, "a share from 0 to below 0.5")
        if self.label_smoothing and self.kind != "sigmoid":
            raise BadInput(
                f"dpo_label_smoothing belongs to the sigmoid loss, and the loss is {self.kind}: "
                "drop one of them."
            )
        for name, value in (("rpo_alpha", self.rpo_alpha), ("simpo_gamma", self.gamma)):
            require(name, value, value >= 0, "0 or above")
        if self.gamma and self.kind != "simpo":
            raise BadInput(f"simpo_gamma belongs to simpo, and the loss is {self.kind}: drop it.")


def preference_objective(preference: Preference) -> Objective:
    """Return the objective of preference training: a mean over the pairs of the global batch."""

    def objective(batch: Batch, local: Tensor, losses: Tensor) -> Reduced:
        reference = None
        if preference.has_reference:
            reference = batch.inputs_of(PairReferences).log_probs.view(-1, 2)
        log_probs, lengths = (x.view(-1, 2) for x in answer_log_probs(batch, local, losses))
        pairs, rewards = pair_losses(log_probs, reference, lengths, preference)
        detached = log_probs.detach()
        numbers = {
            f"{preference.loss} loss": pairs,
            **numbers_of_rewards(rewards),
            "log-prob chosen": detached[:, 0],
            "log-prob rejected": detached[:, 1],
        }
        if preference.rpo_alpha:
            numbers["nll loss"] = -detached[:, 0] / lengths[:, 0]
        return reduction.reduce_units(pairs.sum(), batch, numbers)

    return objective


def pair_losses(
    log_probs: Tensor, reference: Tensor | None, lengths: Tensor, preference: Preference
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each pair.

    Args:
        log_probs: (P, 2) float32, the policy's log-probabilities of the chosen and the rejected
            answer, summed over tokens.
        reference: (P, 2), the reference's log-probabilities, without a gradient; None for a loss
            without a reference.
        lengths: (P, 2), the answers' numbers of tokens.

    Returns:
        The losses (P,), and the rewards (P, 2) without a gradient, float32: beta (log p - log p0),
        or without a reference beta m.
    """
    change = log_probs / lengths if reference is None else log_probs - reference
    rewards = (preference.beta * change).detach()
    if preference.kind == "ipo":
        change = change / lengths
    elif preference.kind == "orpo":
        change = _log_odds(change)
    gap = change[:, 0] - change[:, 1]
    if preference.kind in ("sigmoid", "simpo"):
        wrong, scaled = preference.label_smoothing, preference.beta * gap - preference.gamma
        losses = -(1 - wrong) * F.logsigmoid(scaled)
        if wrong:
            losses = losses - wrong * F.logsigmoid(-scaled)
    elif preference.kind == "orpo":
        losses = -preference.beta * F.logsigmoid(gap)
    elif preference.kind == "hinge":
        losses = F.relu(1 - preference.beta * gap)
    else:
        losses = (gap - 1 / (2 * preference.beta)).square()
    if preference.rpo_alpha:
        losses = losses - preference.rpo_alpha * log_probs[:, 0] / lengths[:, 0]
    return losses, rewards


def _log_odds(means: Tensor) -> Tensor:
    """Return log(p / (1 - p)) with a finite gradient, where `means` is log p <= 0.

    The two forms of log(1 - p) are exact on either side of p = 1/2.
    """
    means = means.clamp(max=-torch.finfo(means.dtype).eps)  # p is 1 to rounding
    low, high = torch.log1p(-means.exp()), torch.log(-torch.expm1(means))
    return means - torch.where(means < -math.log(2), low, high)
