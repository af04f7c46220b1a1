"""The loss over the pairs of a micro-batch, on ranks that each hold a part of every sequence."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.objectives.preference import Preference, pair_losses
from mcore_qwen3vl.training.step.losses import Objective, Reduced, of_units


def of_pairs(preference: Preference) -> Objective:
    """Return the objective of preference training: a mean over the pairs of the global batch.

    Args:
        preference: the loss's settings.
    """

    def objective(batch: Batch, local: Tensor, losses: Tensor) -> Reduced:
        if preference.has_reference and batch.references is None:
            raise BadInput("The batch has no log-probabilities of the reference.")
        log_probs, lengths = answer_log_probs(batch, local, losses)
        pairs = pair_losses(log_probs, batch.references, lengths, preference)
        found = log_probs.detach()
        numbers = {
            f"{preference.loss} loss": pairs.losses,
            "rewards chosen": pairs.chosen_rewards,
            "rewards rejected": pairs.rejected_rewards,
            "rewards margin": pairs.margins,
            "rewards accuracy": pairs.accuracies,
            "log-prob chosen": found[:, 0],
            "log-prob rejected": found[:, 1],
        }
        if preference.rpo_alpha:
            numbers["nll loss"] = -found[:, 0] / lengths[:, 0]
        return of_units(pairs.losses.sum(), len(found), numbers)

    return objective


def answer_log_probs(batch: Batch, local: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the log-probabilities of every pair over the trained tokens and over CP.

    Args:
        batch: sequences in the order chosen, rejected, chosen, rejected and so on.
        local: (s,) int64 on the host: this rank's positions in the sequence.
        losses: (B, s) float32 cross entropies there.

    Returns:
        (P, 2) float32 log-probabilities, with a gradient for `losses`; (P, 2) float32 numbers of
        tokens.
    """
    count = batch.counts.samples
    own = to_device(local, losses.device)
    trained = batch.loss_weights.index_select(1, own) > 0
    sequence = to_device(batch.sequences(), losses.device).index_select(1, own)  # (B, s)
    numbers = torch.arange(count, device=losses.device)[:, None, None]
    member = (sequence == numbers) & trained  # (2P, B, s)
    # A sum has a fixed order, unlike a scatter-add. Padding is masked: its loss may be infinite.
    of_tokens = torch.where(member, -losses, 0.0).sum((1, 2))
    group = parallel_state.get_context_parallel_group()
    summed = reduce_from_tensor_model_parallel_region(of_tokens, group=group)  # passes gradients on
    lengths = member.sum((1, 2), dtype=torch.float32)
    torch.distributed.all_reduce(lengths, group=group)
    return summed.view(-1, 2), lengths.view(-1, 2)
