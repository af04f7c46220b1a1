"""The loss of reward models: Bradley-Terry over pairs of a chosen and a rejected answer.

Source: Ouyang et al., "Training language models to follow instructions with human feedback", 2022;
the margin is that of Touvron et al., "Llama 2", 2023, as in TRL's ``RewardTrainer``:
-log sigmoid(r(chosen) - r(rejected) - margin).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def reward_losses(rewards: Tensor, margins: Tensor) -> Tensor:
    """Compute the loss (P,) of each pair.

    Args:
        rewards: (P, 2) float32, of the chosen and the rejected answer.
        margins: (P,) float32, by how much the chosen answer is better.
    """
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - margins)
