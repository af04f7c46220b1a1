"""Training of classifiers: a score for each label at the last token."""

from __future__ import annotations

from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.objectives.classification import classification_losses
from mcore_qwen3vl.training.step.losses import Objective, Reduced, of_units


def of_labels(labels: Labels) -> Objective:
    """Return the objective of classifiers: a mean over the records of the global batch."""

    def objective(batch: Batch, local: Tensor, logits: Tensor) -> Reduced:
        if batch.targets is None:
            raise BadInput("The batch has no labels.")
        losses, right = classification_losses(logits, batch.targets, is_single=labels.is_single)
        numbers = {"classification loss": losses, "accuracy": right}
        return of_units(losses.sum(), batch, numbers)

    return objective
