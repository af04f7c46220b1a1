"""``--task reward``: a score at the last token, which is to be higher for the chosen answer.

The loss of a pair is Bradley-Terry's, -log sigmoid(r(chosen) - r(rejected) - margin). Source:
Ouyang et al., "Training language models to follow instructions with human feedback", 2022; the
margin is that of Touvron et al., "Llama 2", 2023, as in TRL's ``RewardTrainer``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.labels import ONE_SCORE, Labels
from mcore_qwen3vl.lazy import Lazy
from mcore_qwen3vl.losses.pairs import PairRecords, numbers_of_rewards
from mcore_qwen3vl.losses.task import TaskLoss
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.forward import RunBatch
    from mcore_qwen3vl.losses import last_token, reduction
    from mcore_qwen3vl.losses.reduction import Objective, Reduced
else:
    torch, F = map(Lazy, ("torch", "torch.nn.functional"))
    last_token = Lazy("mcore_qwen3vl.losses.last_token")
    reduction = Lazy("mcore_qwen3vl.losses.reduction")


@dataclass(frozen=True)
class Margins(TaskInputs):
    """By how much the chosen answers are better."""

    margins: Tensor  # (pairs,) float32

    @classmethod
    def of_records(
        cls, records: Sequence[Any], assemble: Callable[..., Any], config: Any
    ) -> Self | None:
        return cls(torch.tensor([record.target for record in records], dtype=torch.float32))


@dataclass(frozen=True)
class RewardRecords(PairRecords):
    """Preference records, of whose answers the last token counts."""

    named_by = "--task reward"
    needed_by = "--task reward needs"


@dataclass(frozen=True)
class Reward(TaskLoss):
    """The loss of reward models; it has no settings."""

    names = ("reward",)
    help = (
        "reward: train a score at the last token with the Bradley-Terry loss, on preference "
        "records; the model has the head `score` instead of lm_head"
    )
    unit = "pairs"
    lm_head = False
    logged = ("reward loss",)
    records = RewardRecords()
    trains_score = True

    def labels(self, run: RunSettings, lora: LoraSettings) -> Labels:
        return ONE_SCORE

    def reads(self, run: RunSettings, lora: LoraSettings) -> dict[str, Any]:
        return {**super().reads(run, lora), "inputs": Margins}

    def summary(self, run: RunSettings, lora: LoraSettings) -> list[tuple[str, str]]:
        return [
            ("loss", "Bradley-Terry over pairs"),
            ("head", "score, one value at the last token"),
        ]

    def objective(self, run: RunSettings, lora: LoraSettings) -> Objective:
        return reward_objective

    def compute(self, run: RunSettings) -> RunBatch:
        return last_token.SCORES


def reward_objective(batch: Batch, local: Tensor, values: Tensor) -> Reduced:
    """Compute the mean loss over the pairs of the global batch."""
    rewards = values.view(-1, 2)
    losses = reward_losses(rewards, batch.inputs_of(Margins).margins)
    numbers = {"reward loss": losses, **numbers_of_rewards(rewards)}
    return reduction.reduce_units(losses.sum(), batch, numbers)


def reward_losses(rewards: Tensor, margins: Tensor) -> Tensor:
    """Compute the loss (P,) of each pair.

    Args:
        rewards: (P, 2) float32, of the chosen and the rejected answer.
        margins: (P,) float32, by how much the chosen answer is better.
    """
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margins)
