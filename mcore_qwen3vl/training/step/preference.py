"""The losses over the answers of a micro-batch, on ranks that each hold a part of every sequence.

A reference in memory takes one more forward pass in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.lora.adapter_module import switched_off
from mcore_qwen3vl.objectives.losses import labelled_losses, pair_losses
from mcore_qwen3vl.objectives.settings import Kto, Preference
from mcore_qwen3vl.training.step.forward import forward
from mcore_qwen3vl.training.step.losses import Objective, Reduced, of_units
from mcore_qwen3vl.training.step.two_passes import (
    Within,
    evaluated,
    finding,
    forward_pass,
    read,
    replayed,
)


def of_pairs(preference: Preference) -> Objective:
    """Return the objective of preference training: a mean over the pairs of the global batch."""

    def objective(batch: Batch, local: Tensor, losses: Tensor) -> Reduced:
        if preference.has_reference and batch.references is None:
            raise BadInput("The batch has no log-probabilities of the reference.")
        log_probs, lengths = (one.view(-1, 2) for one in answer_log_probs(batch, local, losses))
        reference = None if batch.references is None else batch.references.view(-1, 2)
        pairs = pair_losses(log_probs, reference, lengths, preference)
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
    count = len(batch.lengths)
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
    dist.all_reduce(lengths, group=group)
    return summed, lengths


ANSWERS_STEP = finding(
    forward, lambda batch, local, losses: answer_log_probs(batch, local, losses.float())[0]
)
"""The forward step of a first pass, which finds the answers' log-probabilities (N,)."""


def with_baseline(within: Within, schedule: Callable[..., Any], **given: Any) -> Any:
    """Run Megatron's `schedule` after a pass for the reference and two for KTO's baseline.

    The baseline is a mean over the global batch: over all micro-batches of all data-parallel ranks.
    So the policy and the reference compute the exchanged answers of a whole iteration before the
    first micro-batch is trained.
    """
    held = read(given)
    exchanged = [[batch.exchanged() for batch in batches] for batches in held]
    policy, of_reference, reference = (
        forward_pass(schedule, given, batches, first=ANSWERS_STEP, within=model)
        for batches, model in ((exchanged, evaluated), (exchanged, within), (held, within))
    )
    if reference:  # the last stage
        baseline = _baseline(policy, of_reference)
        held[-1] = [
            replace(batch, references=one, baseline=baseline)
            for batch, one in zip(held[-1], reference, strict=True)
        ]
    return schedule(**{**given, "data_iterator": replayed(held)})


def _baseline(policy: list[Tensor], reference: list[Tensor]) -> Tensor:
    """Return the mean difference of log-probabilities over all data-parallel ranks, a scalar.

    A record that is alone in its micro-batch has kept its own answer, and is left out. If all are
    alone, the baseline is 0.
    """
    changes = [p - r for p, r in zip(policy, reference, strict=True) if len(p) > 1]
    found = torch.cat([policy[0].new_zeros(0), *changes])
    sums = torch.stack([found.sum(), torch.full_like(found.sum(), len(found))])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return sums[0] / sums[1].clamp(min=1)


@contextmanager
def without_adapter(model: Any) -> Iterator[Any]:
    """Give the chunks in evaluation mode, without their adapters and without gradients."""
    chunks = unwrap_model(model if isinstance(model, list) else [model])
    with evaluated(model), switched_off([chunk.adapter for chunk in chunks]):
        yield model
