"""Reward model training: a score at the last token of the chosen and the rejected answer."""

from __future__ import annotations

from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.reward import reward_losses
from mcore_qwen3vl.training.step.losses import Reduced, of_units


def of_rewards(batch: Batch, local: Tensor, values: Tensor) -> Reduced:
    """Compute the objective of reward models: a mean over the pairs of the global batch."""
    if batch.targets is None:
        raise BadInput("The batch has no margins.")
    rewards = values.view(-1, 2)
    losses = reward_losses(rewards, batch.targets)
    gaps = rewards[:, 0] - rewards[:, 1]
    numbers = {
        "reward loss": losses,
        "rewards chosen": rewards[:, 0],
        "rewards rejected": rewards[:, 1],
        "rewards margin": gaps,
        "rewards accuracy": (gaps > 0).float(),
    }
    return of_units(losses.sum(), batch, numbers)
