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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_qwen3vl.data.config import names_to_log, parse_sources
from mcore_qwen3vl.data.encoding.batch import (
    Batch,
    Contrast,
    Labelled,
    LabelledReferences,
    Margins,
    PairReferences,
    RightLabels,
    Scores,
    TaskInputs,
)
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.data.scores import Top
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.model.decoder.attention import PackedSequence
from mcore_qwen3vl.model.head import Head, likeliest, log_probs_of
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.lora_modules import without_factors
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.objectives import losses as formulas
from mcore_qwen3vl.objectives.settings import Contrastive, Distillation, Kto, Preference, Ranking
from mcore_qwen3vl.training.arguments.run import DISTILL, KTO, LOSSES
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.forward_step import (
    ForwardStep,
    Objective,
    Reduced,
    RunBatch,
    cross_entropy,
    find_loss,
    forward,
    further_token_objective,
    reduce_units,
    token_objective,
)
from mcore_qwen3vl.training.hooks import Wrapper, call_original
from mcore_qwen3vl.training.second_model import SecondModel

Within = Callable[[Any], AbstractContextManager[Any]]
"""A function that makes, from the model that trains, a context which gives the model to run."""


def run_two_passes(
    schedule: Callable[..., Any],
    *,
    first: Callable[..., Any],
    within: Within,
    inputs: Callable[[list[Batch], list[Any]], Iterable[TaskInputs]] = lambda batches, results: (
        results
    ),
    **arguments: Any,
) -> Any:
    """Run Megatron's `schedule` twice, and return what its second call returns.

    An iteration's micro-batches are all read before it begins, and kept until it ends.

    Args:
        schedule: the schedule, which `arguments` are for.
        first: the forward step of the first pass.
        within: gives the model of the first pass.
        inputs: makes each micro-batch's `task` from the micro-batches and from what the loss
            function of `first` returned for each. Only the last stage calls it.
    """
    of_chunks = read_batches(arguments)
    # Stages before the last have no results.
    if results := forward_pass(schedule, arguments, of_chunks, first=first, within=within):
        of_batches = zip(of_chunks[-1], inputs(of_chunks[-1], results), strict=True)
        of_chunks[-1] = [replace(batch, task=task) for batch, task in of_batches]
    return schedule(**{**arguments, "data_iterator": replay(of_chunks)})


def first_pass_step(
    run: RunBatch, values: Callable[[Batch, Tensor, Tensor], Any]
) -> Callable[..., tuple[Tensor, Callable[..., Any]]]:
    """Return the forward step of a first pass, which finds `values` in what `run` returns.

    On the last stage, these get the micro-batch, this rank's positions and the output.
    """

    def step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        output, local = run(batch, model)
        # Megatron passes `non_loss_data` by name where it collects what is no loss.
        return output, lambda output, non_loss_data: values(batch, local, output)

    return step


def read_batches(arguments: Mapping[str, Any]) -> list[list[Batch]]:
    """Read the micro-batches of an iteration for each of this rank's pipeline chunks."""
    streams, count = arguments["data_iterator"], arguments["num_microbatches"]
    several = isinstance(streams, list)
    return [[next(stream) for _ in range(count)] for stream in (streams if several else [streams])]


def forward_pass(
    schedule: Callable[..., Any],
    arguments: Mapping[str, Any],
    batches: list[list[Batch]],
    *,
    first: Callable[..., Any],
    within: Within,
) -> list[Any]:
    """Run the forward passes alone; on the last stage return what `first`'s loss function gave."""
    with within(arguments["model"]) as model:
        results: list[Any] = schedule(
            **{
                **arguments,
                "model": model,
                "data_iterator": replay(batches),
                "forward_step_func": first,
                "forward_only": True,
                "collect_non_loss_data": True,
            }
        )
    return results


def replay(of_chunks: list[list[Batch]]) -> Any:
    """Return the micro-batches as Megatron's schedule takes them: one stream, or one a chunk."""
    streams = [iter(batches) for batches in of_chunks]
    return streams if len(streams) > 1 else streams[0]


@contextmanager
def evaluation_mode(model: Any) -> Iterator[Any]:
    """Give the chunks in evaluation mode and without gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for chunk in unwrap_model(model if isinstance(model, list) else [model]):
            stack.callback(chunk.train, chunk.training)  # restores the mode that it had
            chunk.eval()
        yield model


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
            **formulas.numbers_of_rewards(rewards),
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


@contextmanager
def without_adapter(model: Any) -> Iterator[Any]:
    """Give the chunks in evaluation mode, without their adapters and without gradients."""
    chunks = unwrap_model(model if isinstance(model, list) else [model])
    with evaluation_mode(model), without_factors([chunk.adapter for chunk in chunks]):
        yield model


Read = Callable[[Tensor, Any, Tensor | None], Tensor]
"""``(states, head, weight) -> values``.

Args:
    states: (N, H) float32 hidden states of the last tokens on this CP rank, zeros for the others.
        All TP ranks have them.
    head: the chunk's output layer.
    weight: (V / tp, H) weight of a tied head.

Returns:
    (N, K) float32, equal on all TP ranks, and zero where the states are.
"""


def _last_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the rows and the columns of the samples' last tokens, (N,) int64 each, on the host."""
    lengths = torch.tensor(batch.lengths)
    if batch.cu_seqlens is None:
        return torch.arange(len(lengths)), lengths - 1
    starts = batch.cu_seqlens[: len(lengths)].long()
    return torch.zeros_like(lengths), starts + lengths - 1


def _read_last_tokens(
    read: Read,
    batch: Batch,
    chunk: Qwen3VLModel,
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    packed_seq_params: PackedSequence | None,
    **_: Any,
) -> Tensor:
    """Read the last tokens among this rank's hidden states (s, B, H), and add up all CP ranks'.

    Each token is on one rank. A sum passes each rank the gradient of its own tokens. The head comes
    before the sum over CP, so that its gradient on a CP rank is that of the rank's own tokens, as
    for all other parameters.
    """
    sharded = chunk.config.sequence_parallel
    length = batch.input_ids.shape[1]
    local = chunk.local_tokens(length, packed_seq_params, sequence_parallel=sharded)
    places = torch.full((length,), -1)
    places[local] = torch.arange(len(local))
    rows, columns = _last_tokens(batch)
    at = places[columns]
    device = hidden_states.device
    is_here = to_device(at >= 0, device)[:, None]  # -1: another rank has the token
    states = hidden_states[to_device(at.clamp(min=0), device), to_device(rows, device)].float()
    states = torch.where(is_here, states, 0.0)
    if sharded:
        group = parallel_state.get_tensor_model_parallel_group()
        states = reduce_from_tensor_model_parallel_region(states, group=group)
    group = parallel_state.get_context_parallel_group()
    values = read(states, output_layer, output_weight)
    return reduce_from_tensor_model_parallel_region(values, group=group)


def last_token_runner(read: Read) -> RunBatch:
    """Return what runs a micro-batch through a pipeline chunk and reads its last tokens.

    On the last stage it returns (N, K) values, float32 and equal on all ranks of a TP x CP group.
    """
    return partial(forward, processor=partial(_read_last_tokens, read))


EMBED = last_token_runner(lambda states, head, weight: states)
"""Runs a micro-batch, whose values are (N, H) embeddings, not normalised."""
SCORES = last_token_runner(lambda states, head, weight: head(states))
"""Runs a micro-batch, whose values are the scores (N, labels) of a classifier's head."""


def reward_objective(batch: Batch, local: Tensor, values: Tensor) -> Reduced:
    """Compute the mean loss of reward models over the pairs."""
    rewards = values.view(-1, 2)
    losses = formulas.reward_losses(rewards, batch.inputs_of(Margins).margins)
    numbers = {"reward loss": losses, **formulas.numbers_of_rewards(rewards)}
    return reduce_units(losses.sum(), batch, numbers)


def classification_objective(
    labels: Labels, batch: Batch, local: Tensor, logits: Tensor
) -> Reduced:
    """Compute the mean loss of classifiers over the records."""
    inputs = batch.inputs_of(RightLabels)
    losses, right = formulas.classification_losses(
        logits, inputs.right, exclusive=labels.are_exclusive
    )
    return reduce_units(losses.sum(), batch, {"classification loss": losses, "accuracy": right})


def ranking_objective(ranking: Ranking, batch: Batch, local: Tensor, logits: Tensor) -> Reduced:
    """Compute the mean loss of rerankers over documents (``pointwise``) or queries (``listwise``).

    Its values are the logits of ``yes`` and ``no`` after a query and a document.
    """
    losses, right = formulas.ranking_losses(relevance(logits), batch.groups, ranking)
    return reduce_units(losses.sum(), batch, {"reranker loss": losses, "accuracy": right})


def answer_word_runner(folder: str | Path, words: tuple[str, str]) -> RunBatch:
    """Return what runs a micro-batch, whose values are the logits (N, 2) of two words.

    It raises BadInput if a word is not a single token.
    """
    tokenizer = load_processor(folder).tokenizer
    tokens = []
    for word in words:
        ids = tokenizer(word, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise BadInput(
                f"The answer {word!r} is {len(ids)} tokens in this tokenizer; a reranker's "
                "answers are one token each: name two others with --answers."
            )
        tokens += ids
    return last_token_runner(lambda states, head, weight: head(states, weight, tokens=tokens)[0])


def relevance(logits: Tensor) -> Tensor:
    """Return each document's logit of relevance (N,), from the logits (N, 2) of the answers."""
    # The sigmoid of it is the score of Qwen3-VL-Reranker.
    return logits[:, 0] - logits[:, 1]


def embedding_objective(contrastive: Contrastive) -> Objective:
    """Return the objective of embedding training: a mean over the queries of the global batch."""

    def objective(batch: Batch, local: Tensor, embeddings: Tensor) -> Reduced:
        contrast = batch.task
        if not isinstance(contrast, Contrast):  # no first pass has found it
            (contrast,) = contrasts(contrastive, [batch], [embeddings.detach()])
        # The gradient of this is that of the global batch's loss.
        total = (embeddings * contrast.gradients).sum()
        return reduce_units(total, batch, {contrastive.name: contrast.losses})

    return objective


def run_with_contrasts(
    contrastive: Contrastive, schedule: Callable[..., Any], **arguments: Any
) -> Any:
    """Run Megatron's `schedule` after a pass for all embeddings, if there are several to gather."""
    if arguments["num_microbatches"] == 1:
        return schedule(**arguments)
    inputs = partial(contrasts, contrastive)
    first = first_pass_step(EMBED, lambda batch, local, embeddings: embeddings)
    return run_two_passes(schedule, first=first, within=evaluation_mode, inputs=inputs, **arguments)


def contrasts(
    contrastive: Contrastive, batches: Sequence[Batch], embeddings: Sequence[Tensor]
) -> list[Contrast]:
    """Differentiate the loss of all DP ranks' micro-batches with respect to their embeddings.

    All data-parallel ranks call this, each with its own micro-batches, and all compute the same
    loss of all queries.

    Args:
        embeddings: (N, H) float32 for each of them, without a gradient.

    Returns:
        For each of `batches`, the losses of its queries, and the gradient of the sum of all ranks'
        losses.
    """
    groups_of_batches = [() if batch.is_spare else batch.groups for batch in batches]
    vectors = [rows[: sum(of)] for rows, of in zip(embeddings, groups_of_batches, strict=True)]
    groups: list[Any] = [None] * parallel_state.get_data_parallel_world_size()
    dist.all_gather_object(
        groups, groups_of_batches, group=parallel_state.get_data_parallel_group_gloo()
    )
    sizes = [sum(map(sum, of_rank)) for of_rank in groups]
    everyone = _gather_rows(torch.cat(vectors), sizes).requires_grad_()
    queries = [sum(map(len, of_rank)) for of_rank in groups]
    scores = None
    if contrastive.takes_scores:
        of_batches = zip(batches, groups_of_batches, strict=True)
        own = [batch.inputs_of(Scores).scores[: len(of)] for batch, of in of_batches]
        scores = _gather_rows(torch.cat(own)[:, None], queries)[:, 0]
    texts = [size for of_rank in groups for rows in of_rank for size in rows]
    with torch.enable_grad():
        losses = formulas.contrastive_losses(everyone, texts, contrastive, scores)
        (gradients,) = torch.autograd.grad(losses.sum(), everyone)
    rank = parallel_state.get_data_parallel_rank()
    mine = losses.detach().split(queries)[rank].split([len(rows) for rows in groups_of_batches])
    of_own = gradients.split(sizes)[rank].split([sum(rows) for rows in groups_of_batches])
    return [
        # A spare batch takes part in no loss.
        Contrast(torch.zeros(len(batch.groups), device=rows.device), torch.zeros_like(rows))
        if batch.is_spare
        else Contrast(losses, gradient)
        for batch, rows, losses, gradient in zip(batches, embeddings, mine, of_own, strict=True)
    ]


def _gather_rows(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the rows (n, H) of all data-parallel ranks, whose numbers are `sizes`, in order."""
    padded = rows.new_zeros(max(sizes), rows.shape[1])
    padded[: len(rows)] = rows
    everyone = rows.new_empty(len(sizes) * len(padded), rows.shape[1])
    dist.all_gather_into_tensor(everyone, padded, group=parallel_state.get_data_parallel_group())
    of_ranks = zip(everyone.chunk(len(sizes)), sizes, strict=True)
    return torch.cat([rows[:count] for rows, count in of_ranks])


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
    task = settings.task
    if task.task == "embedding":
        return step(embedding_objective(task.contrastive), EMBED)
    if task.task == "reward":
        return step(reward_objective, SCORES)
    if task.task == "reranker":
        run = answer_word_runner(settings.model.folder, task.words)
        return step(partial(ranking_objective, task.ranking), run)
    if labels := settings.labels:
        return step(partial(classification_objective, labels), SCORES)
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
    passes: Callable[..., Any]
    if settings.task.task == "embedding":
        passes = partial(run_with_contrasts, settings.task.contrastive)
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
        return call_original
    return lambda original, *args, **kwargs: partial(passes, original(*args, **kwargs))
