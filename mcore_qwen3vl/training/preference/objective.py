"""The loss over the answers of a micro-batch, on ranks that each hold a part of every sequence."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.objectives.preference import labelled_losses, pair_losses
from mcore_qwen3vl.objectives.settings import Kto, Preference
from mcore_qwen3vl.training.step.losses import Objective, Reduced, of_units


def of_pairs(preference: Preference) -> Objective:
    """Return the objective of preference training: a mean over the pairs of the global batch."""

    def objective(batch: Batch, local: Tensor, losses: Tensor) -> Reduced:
        if preference.has_reference and batch.references is None:
            raise BadInput("The batch has no log-probabilities of the reference.")
        log_probs, lengths = (one.view(-1, 2) for one in answer_log_probs(batch, local, losses))
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
        return of_units(pairs.losses.sum(), batch, numbers)

    return objective


def of_labelled(kto: Kto) -> Objective:
    """Return the objective of KTO: a mean over the records of the global batch."""

    def objective(batch: Batch, local: Tensor, losses: Tensor) -> Reduced:
        if batch.references is None or batch.baseline is None or batch.desirable is None:
            raise BadInput("The batch has no labels, or no log-probabilities of the reference.")
        log_probs, _ = answer_log_probs(batch, local, losses)
        wanted = batch.desirable
        of_answers, rewards = labelled_losses(
            log_probs, batch.references, wanted, batch.baseline, kto
        )
        found = log_probs.detach()
        numbers = {
            "kto loss": of_answers,
            "kl baseline": batch.baseline.clamp(min=0).expand(len(found)),
        }
        reduced = of_units(of_answers.sum(), batch, numbers)
        of_kinds = {}
        for name, mask in (("desirable", wanted), ("undesirable", ~wanted)):
            # A log interval may be without one kind of answer; 0 / 0 would be logged as NaN.
            count = mask.sum(dtype=torch.float32).clamp(min=1e-30)
            for what, values in (("rewards", rewards), ("log-prob", found)):
                of_kinds[f"{what} {name}"] = torch.stack([values.where(mask, 0.0).sum(), count])
        # Every CP rank counts all answers of a kind, which cancels in their mean.
        return reduced._replace(sums={**reduced.sums, **of_kinds})

    return objective


def answer_log_probs(batch: Batch, local: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the log-probabilities of every sequence over the trained tokens and over CP.

    Args:
        local: (s,) int64 on the host: this rank's positions in the sequence.
        losses: (B, s) float32 cross entropies there.

    Returns:
        (N,) float32 log-probabilities, with a gradient for `losses`; (N,) float32 numbers of
        tokens. Those of pairs are in the order chosen, rejected, chosen, rejected and so on.
    """
    count = batch.counts.samples
    own = to_device(local, losses.device)
    trained = batch.loss_weights.index_select(1, own) > 0
    sequence = to_device(batch.sequences(), losses.device).index_select(1, own)  # (B, s)
    numbers = torch.arange(count, device=losses.device)[:, None, None]
    member = (sequence == numbers) & trained  # (N, B, s)
    # A sum has a fixed order, unlike a scatter-add. Padding is masked: its loss may be infinite.
    of_tokens = torch.where(member, -losses, 0.0).sum((1, 2))
    group = parallel_state.get_context_parallel_group()
    summed = reduce_from_tensor_model_parallel_region(of_tokens, group=group)  # passes gradients on
    lengths = member.sum((1, 2), dtype=torch.float32)
    torch.distributed.all_reduce(lengths, group=group)
    return summed, lengths
