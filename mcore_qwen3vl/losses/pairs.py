"""What the losses over pairs of a chosen and a rejected answer share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def numbers_of_rewards(rewards: Tensor) -> dict[str, Tensor]:
    """Return the log's numbers (P,), by name, of the rewards (P, 2) of pairs.

    A pair is right, 1.0 and not 0.0, if the chosen answer's reward is the higher one.
    """
    chosen, rejected = rewards.unbind(1)
    return {
        "rewards chosen": chosen,
        "rewards rejected": rejected,
        "rewards margin": chosen - rejected,
        "rewards accuracy": (chosen - rejected > 0).float(),
    }
