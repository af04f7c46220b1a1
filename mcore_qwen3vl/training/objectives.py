"""What a run minimises: its forward step, its loss, and the passes that a step takes.

Pairs, labelled answers and a teacher
-------------------------------------

Each rank holds a part of every sequence. A reference or a teacher in memory takes one more forward
pass in each step: Megatron's schedule is called twice, first without gradients, so that every
pipeline split works. A teacher's pass keeps its likeliest tokens.

Tasks
-----

Their losses are means over the global batch, and read the last tokens as ``_pooling_last`` of
Qwen3-VL-Embedding does, after the final norm.

The loss of an embedded query depends on every document of the global batch, and these are never in
one forward pass. So the embeddings are first computed without gradients, gathered, and the loss is
differentiated with respect to them; a second pass then takes each micro-batch's part of that
gradient through the model. Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup", 2021 (GradCache). With one micro-batch a rank, one pass is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from mcore_qwen3vl.data.config import names_to_log, parse_sources
from mcore_qwen3vl.data.encoding.batch import (
    Batch,
    Labelled,
    LabelledReferences,
    PairReferences,
)
from mcore_qwen3vl.data.scores import Top
from mcore_qwen3vl.losses.pairs import numbers_of_rewards
from mcore_qwen3vl.losses.passes import (
    Within,
    evaluation_mode,
    first_pass_step,
    forward_pass,
    read_batches,
    replay,
    run_two_passes,
    without_adapter,
)
from mcore_qwen3vl.model.decoder.attention import PackedSequence
from mcore_qwen3vl.model.head import Head, likeliest, log_probs_of
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.objectives import losses as formulas
from mcore_qwen3vl.objectives.settings import Distillation, Kto, Preference
from mcore_qwen3vl.training.arguments.run import DISTILL, KTO, LOSSES
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.forward_step import (
    ForwardStep,
    Objective,
    Reduced,
    cross_entropy,
    find_loss,
    forward,
    further_token_objective,
    reduce_units,
    token_objective,
)
from mcore_qwen3vl.training.hooks import Wrapper, call_original
from mcore_qwen3vl.training.second_model import SecondModel


def distillation_objective(settings: Distillation) -> Objective:
    """Return the objective of distillation: a mean over the trained tokens of the global batch."""
    mean = token_objective(cross_entropy)

    def objective(batch: Batch, local: Tensor, values: Tensor) -> Reduced:
        divergence, of_labels = values
        # The squared temperature makes up for gradients that are as much smaller.
        scaled = settings.temperature**2 * divergence
        reduced = mean(batch, local, settings.alpha * of_labels + (1 - settings.alpha) * scaled)
        weights = batch.loss_weights.index_select(1, to_device(local, values.device))
        parts = {"divergence": divergence, "lm loss": of_labels}
        sums = {name: cross_entropy(part.detach(), weights)[0] for name, part in parts.items()}
        return reduced._replace(sums={f"{DISTILL} loss": reduced.total.detach(), **sums})

    return objective


def _divergences_and_cross_entropies(
    settings: Distillation,
    batch: Batch,
    chunk: Qwen3VLModel,
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    labels: Tensor,
    packed_seq_params: PackedSequence | None,
    **_: Any,
) -> Tensor:
    """Return (2, B, s) float32: divergences from the teacher, and cross entropies."""
    local = chunk.local_tokens(batch.input_ids.shape[1], packed_seq_params)
    ids, teacher = _teacher_at(batch, to_device(local, labels.device))
    student, of_labels = output_layer(
        hidden_states,
        output_weight,
        reduce=partial(log_probs_of, ids=ids, targets=labels, temperature=settings.temperature),
    )
    return torch.stack([formulas.divergences(student, teacher, settings), -of_labels])


def _teacher_at(batch: Batch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the teacher's ids (B, s, k) and log-probabilities (B, s, k + 1) at `positions`."""
    teacher = batch.inputs_of(Top)
    if teacher.ids.ndim == 3:  # a live teacher's, at these positions
        return teacher.ids, teacher.log_probs
    # A file has rows for the trained positions alone, in order, and a last one for all others.
    trained = batch.loss_weights > 0
    number = trained.flatten().cumsum(0).view_as(trained) - 1
    row = number.where(trained, len(teacher.ids) - 1).index_select(1, positions)
    return teacher.ids[row], teacher.log_probs[row]


def _teachers_likeliest(
    batch: Batch,
    chunk: Qwen3VLModel,
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    k: int,
    temperature: float,
    **_: Any,
) -> Tensor:
    """Compute (B, s, 2 k + 1) float32: k ids, their log-probabilities and that of the rest."""
    ids, log_probs = output_layer(
        hidden_states, output_weight, reduce=partial(likeliest, k=k, temperature=temperature)
    )
    return torch.cat([ids.float(), log_probs], -1)  # Megatron passes one tensor on


def preference_objective(preference: Preference) -> Objective:
    """Return the objective of preference training: a mean over the pairs of the global batch."""

    def objective(batch: Batch, local: Tensor, losses: Tensor) -> Reduced:
        reference = None
        if preference.has_reference:
            reference = batch.inputs_of(PairReferences).log_probs.view(-1, 2)
        log_probs, lengths = (x.view(-1, 2) for x in answer_log_probs(batch, local, losses))
        pairs, rewards = formulas.pair_losses(log_probs, reference, lengths, preference)
        detached = log_probs.detach()
        numbers = {
            f"{preference.loss} loss": pairs,
            **numbers_of_rewards(rewards),
            "log-prob chosen": detached[:, 0],
            "log-prob rejected": detached[:, 1],
        }
        if preference.rpo_alpha:
            numbers["nll loss"] = -detached[:, 0] / lengths[:, 0]
        return reduce_units(pairs.sum(), batch, numbers)

    return objective


def kto_objective(kto: Kto) -> Objective:
    """Return the objective of KTO: a mean over the records of the global batch."""

    def objective(batch: Batch, local: Tensor, losses: Tensor) -> Reduced:
        inputs = batch.inputs_of(LabelledReferences)
        log_probs, _ = answer_log_probs(batch, local, losses)
        wanted, baseline, before = inputs.desirable, inputs.baseline, inputs.log_probs
        of_answers, rewards = formulas.labelled_losses(log_probs, before, wanted, baseline, kto)
        detached = log_probs.detach()
        numbers = {
            "kto loss": of_answers,
            "kl baseline": baseline.clamp(min=0).expand(len(detached)),
        }
        reduced = reduce_units(of_answers.sum(), batch, numbers)
        of_kinds = {}
        for name, mask in (("desirable", wanted), ("undesirable", ~wanted)):
            # A log interval may be without one kind of answer; 0 / 0 would be logged as NaN.
            count = mask.sum(dtype=torch.float32).clamp(min=1e-30)
            for what, values in (("rewards", rewards), ("log-prob", detached)):
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
    positions = to_device(local, losses.device)
    trained = batch.loss_weights.index_select(1, positions) > 0
    sequence = to_device(batch.sequences(), losses.device).index_select(1, positions)  # (B, s)
    numbers = torch.arange(len(batch.lengths), device=losses.device)[:, None, None]
    member = (sequence == numbers) & trained  # (N, B, s)
    # A sum has a fixed order, unlike a scatter-add. Padding is masked: its loss may be infinite.
    of_tokens = torch.where(member, -losses, 0.0).sum((1, 2))
    group = parallel_state.get_context_parallel_group()
    summed = reduce_from_tensor_model_parallel_region(of_tokens, group=group)  # passes gradients on
    lengths = member.sum((1, 2), dtype=torch.float32)
    dist.all_reduce(lengths, group=group)
    return summed, lengths


ANSWERS_STEP = first_pass_step(
    forward, lambda batch, local, losses: answer_log_probs(batch, local, losses.float())[0]
)
"""The forward step of a first pass, which finds the answers' log-probabilities (N,)."""


def run_with_baseline(within: Within, schedule: Callable[..., Any], **arguments: Any) -> Any:
    """Run Megatron's `schedule` after a pass for the reference and two for KTO's baseline.

    The baseline is a mean over the global batch: over all micro-batches of all data-parallel ranks.
    So the policy and the reference compute the exchanged answers of a whole iteration before the
    first micro-batch is trained.
    """
    of_chunks = read_batches(arguments)
    exchanged = [[batch.with_exchanged_answers() for batch in batches] for batches in of_chunks]
    policy, of_reference, reference = (
        forward_pass(schedule, arguments, batches, first=ANSWERS_STEP, within=model)
        for batches, model in (
            (exchanged, evaluation_mode),
            (exchanged, within),
            (of_chunks, within),
        )
    )
    if reference:  # the last stage
        baseline = _mean_change(policy, of_reference)
        labels = [batch.inputs_of(Labelled).desirable for batch in of_chunks[-1]]
        of_chunks[-1] = [
            replace(batch, task=LabelledReferences(desirable, log_probs, baseline))
            for batch, desirable, log_probs in zip(of_chunks[-1], labels, reference, strict=True)
        ]
    return schedule(**{**arguments, "data_iterator": replay(of_chunks)})


def _mean_change(policy: list[Tensor], reference: list[Tensor]) -> Tensor:
    """Return the mean difference of log-probabilities over all data-parallel ranks, a scalar.

    If all records are alone in their micro-batches, it is 0.
    """
    # A record that is alone in its micro-batch has kept its own answer, and is left out.
    changes = [p - r for p, r in zip(policy, reference, strict=True) if len(p) > 1]
    differences = torch.cat([policy[0].new_zeros(0), *changes])  # there may be no changes
    sums = torch.stack([differences.sum(), torch.full_like(differences.sum(), len(differences))])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return sums[0] / sums[1].clamp(min=1)


def forward_step_of(settings: Settings) -> ForwardStep:
    """Return the forward step with the objective that the run minimises."""
    loop, loss = settings.loop, settings.training.loss
    step = partial(
        ForwardStep,
        data_sets=names_to_log(parse_sources(loop.training_data)),
        validation_sets=names_to_log(
            parse_sources(loop.valid_data_path) if loop.valid_data_path else ()
        ),
    )
    if chosen := settings.loss:
        return step(chosen.objective(settings, settings.lora), chosen.compute(settings))
    if loss in LOSSES:
        return step(preference_objective(settings.preference.pair_settings(loss)))
    if loss == KTO:
        return step(kto_objective(settings.preference.kto))
    if loss == DISTILL:
        distillation = settings.distillation.loss
        compare = partial(
            forward, processor=partial(_divergences_and_cross_entropies, distillation)
        )
        return step(distillation_objective(distillation), compare)
    if loop.mtp_num_layers:
        return step(further_token_objective(find_loss(loss), loop.mtp_loss_scaling_factor))
    return step(token_objective(find_loss(loss)))


def schedule_of(settings: Settings, second: SecondModel | None) -> Wrapper:
    """Return what replaces ``get_forward_backward_func``: some losses take two passes in a step."""
    loss, distillation = settings.training.loss, settings.distillation
    reference = second.in_place_of if second else without_adapter
    passes: Callable[..., Any] | None
    if settings.loss:
        passes = settings.loss.schedule(settings, settings.lora, second and second.in_place_of)
    elif loss == DISTILL and second:
        k = distillation.teacher_top_k
        assert k is not None
        find = partial(_teachers_likeliest, k=k, temperature=distillation.loss.temperature)
        first = first_pass_step(
            partial(forward, processor=find),
            lambda batch, local, values: Top(values[..., :k].int(), values[..., k:]),
        )
        passes = partial(run_two_passes, first=first, within=second.in_place_of)
    elif loss in LOSSES and settings.reference in ("adapter", "model"):
        passes = partial(
            run_two_passes,
            first=ANSWERS_STEP,
            within=reference,
            inputs=lambda batches, log_probs: map(PairReferences, log_probs),
        )
    elif loss == KTO:
        passes = partial(run_with_baseline, reference)
    else:
        passes = None
    if passes is None:
        return call_original
    return lambda original, *args, **kwargs: partial(passes, original(*args, **kwargs))
