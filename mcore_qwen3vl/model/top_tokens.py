"""Log-probabilities of a few tokens, and of all others together.

A teacher's distribution is written as its k likeliest tokens and the rest. The student's
log-probabilities of the same tokens, and of its own rest, are computed from one chunk of logits at
a time, as in :mod:`.log_probs`: the forward pass reduces each chunk to k + 3 numbers per token, and
the backward pass recomputes it. Ranks of a TP group hold different columns; they combine their
numbers in two all-reduces after the loop.

Formulae, with logits l, q = softmax(l / T) and R the rest: d log q[i] / dl = (onehot(i) - q) / T,
and d log q[R] / dl = (r - q) / T, where r is q / sum(q[R]) in the rest, and 0 elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.log_probs import Columns, TermGradient, flat_sides, in_pairs

label_module(__file__, "logits and loss")

FLOOR = math.log(1e-30)
"""The least log-probability of the rest, which would be infinite if nothing is left over."""


@torch.no_grad()
def likeliest(
    hidden: Tensor,
    weight: Tensor,
    columns: Columns,
    *,
    k: int,
    more: Sequence[tuple[Tensor, Tensor]] = (),
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return each position's k likeliest tokens with their log-probabilities.

    Args:
        hidden, weight, columns, more, temperature: as for
            :func:`.log_probs.token_log_probs`.
        k: number of tokens, at most V.

    Returns:
        Token ids (B, s, k) int64, the likeliest first. Log-probabilities (B, s, k + 1) float32:
        theirs, and that of all other tokens together, at least :data:`FLOOR`. Both are equal on all
        ranks, and without gradients.
    """
    terms = in_pairs(flat_sides(hidden, weight, more))
    count, tokens = min(k, columns.count), len(terms[0][0])
    # This rank's candidates, and its logsumexp over its other columns.
    logits = hidden.new_full((tokens, k + 1), -torch.inf, dtype=torch.float32)
    ids = torch.zeros((tokens, k), dtype=torch.int64, device=hidden.device)
    for rows in columns.chunks(tokens):
        every = columns.logits(terms, rows, temperature)
        values, places = every.topk(count)
        logits[rows, :count], ids[rows, :count] = values, places + columns.first
        logits[rows, k] = every.scatter_(1, places, -torch.inf).logsumexp(-1)
        del every  # before the next chunk's are computed
    logits, ids = _gather_over_ranks(logits, columns.group), _gather_over_ranks(ids, columns.group)
    candidates, rest = logits[..., :k].flatten(1), logits[..., k]
    values, places = candidates.topk(k)
    left = candidates.scatter(1, places, -torch.inf)
    log_rest = torch.cat([left, rest], 1).logsumexp(-1, keepdim=True)
    # The k tokens and the rest are all of the vocabulary, so their softmax is over all of it.
    log_probs = torch.cat([values, log_rest], 1).log_softmax(-1).clamp(min=FLOOR)
    shape = (*hidden.shape[:2], -1)
    chosen = ids.flatten(1).gather(1, places)
    return chosen.view(shape).transpose(0, 1), log_probs.view(shape).transpose(0, 1)


def _gather_over_ranks(mine: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return all ranks' (T, n) tensors as (T, ranks, n)."""
    if group is None or group.size() == 1:
        return mine[:, None]
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone, 1)


def log_probs_of(
    hidden: Tensor,
    weight: Tensor,
    columns: Columns,
    *,
    ids: Tensor,
    targets: Tensor,
    more: Sequence[tuple[Tensor, Tensor]] = (),
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of a few tokens of each position, of the rest, and of targets.

    Args:
        hidden, weight, columns, targets, more: as for
            :func:`.log_probs.token_log_probs`.
        ids: (B, s, k) integers in [0, V), k different ones at each position; where they are not
            different, values are finite and mean nothing.
        temperature: divides the logits, but not those for `targets`.

    Returns:
        Log-probabilities (B, s, k + 1) at `temperature`: those of `ids`, and that of all other
        tokens together; and those of the targets (B, s) at temperature 1. Both are float32, equal
        on all ranks, and differentiable with respect to `hidden`, `weight` and all of `more`.
    """
    shape = hidden.shape[:2]
    places = torch.cat([ids, targets[..., None]], -1).transpose(0, 1).flatten(0, 1)
    sides = flat_sides(hidden, weight, more)
    of_ids, of_targets = _LogProbsOf.apply(places, columns, temperature, *sides)
    return of_ids.view(*shape, -1).transpose(0, 1), of_targets.view(shape).t()


class _LogProbsOf(torch.autograd.Function):
    """Log-probabilities (T, k + 1) and (T,) of places (T, k + 1): the ids, then the target.

    Each further pair of arguments is one term of the logits: (T, H) and (V / tp, H).
    """

    @staticmethod
    def forward(
        ctx: Any, places: Tensor, columns: Columns, temperature: float, *sides: Tensor
    ) -> tuple[Tensor, Tensor]:
        terms, tokens = in_pairs(sides), len(places)
        local, ours = columns.locate(places)
        # Numbers of this rank's columns, relative to their maximum: the logits of the places, the
        # sum of exponentials, and that of the rest at the temperature, in this order; the target is
        # the last place. A rank that has only padding keeps the neutral elements.
        lowest = torch.finfo(torch.float32).min
        maximum = places.new_full((tokens,), lowest, dtype=torch.float32)
        numbers = places.new_zeros((tokens, places.shape[1] + 2), dtype=torch.float32)
        for rows in columns.chunks(tokens):
            logits = columns.logits(terms, rows)
            maximum[rows] = logits.amax(-1)
            logits.sub_(maximum[rows, None])
            numbers[rows, :-2] = logits.gather(1, local[rows])
            numbers[rows, -2] = logits.exp().sum(-1)
            weights = logits.div_(temperature).exp_()
            numbers[rows, -1] = _zero_ids_in_place(weights, local[rows], ours[rows]).sum(-1)
            del logits, weights  # before the next chunk's are computed
        overall = _combine_numbers_in_place(maximum, numbers, ours, temperature, columns.group)
        of_ids, rest = numbers[:, :-3] / temperature, numbers[:, -1:]
        log_sum = (of_ids.exp().sum(-1, keepdim=True) + rest).log()
        log_probs = torch.cat([of_ids - log_sum, (rest.log() - log_sum).clamp(min=FLOOR)], 1)
        log_sum_of_targets = numbers[:, -2].log()
        ctx.columns, ctx.temperature = columns, temperature
        totals = (overall / temperature + log_sum[:, 0], overall + log_sum_of_targets)
        ctx.save_for_backward(local, ours, log_probs, *totals, *sides)
        return log_probs, numbers[:, -3] - log_sum_of_targets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_ids: Tensor, of_targets: Tensor) -> tuple[Tensor | None, ...]:
        local, ours, log_probs, total, total_of_targets, *sides = ctx.saved_tensors
        columns, temperature = ctx.columns, ctx.temperature
        terms, wanted = in_pairs(sides), in_pairs(ctx.needs_input_grad[3:])
        # The least log-probability of the rest does not change with the logits.
        of_rest = of_ids[:, -1:].where(log_probs[:, -1:] > FLOOR, 0.0) / temperature
        of_ids = of_ids[:, :-1] / temperature
        total_of_ids = of_ids.sum(-1, keepdim=True) + of_rest
        of_rest = of_rest / log_probs[:, -1:].exp() - total_of_ids
        of_ids = of_ids - total_of_ids * log_probs[:, :-1].exp()
        of_places = torch.cat([of_ids, of_targets[:, None]], 1).where(ours, 0.0)
        gradients = [TermGradient(x, w, *term) for (x, w), term in zip(terms, wanted, strict=True)]
        for rows in columns.chunks(len(local)):
            logits = columns.logits(terms, rows)
            gradient = (logits - total_of_targets[rows, None]).exp_()
            gradient.mul_(-of_targets[rows, None])
            weights = logits.div_(temperature).sub_(total[rows, None]).exp_()
            gradient.addcmul_(_zero_ids_in_place(weights, local[rows], ours[rows]), of_rest[rows])
            gradient.scatter_add_(1, local[rows], of_places[rows])
            narrow = gradient.to(sides[0].dtype)
            del logits, weights, gradient
            for term in gradients:
                term.add(narrow, rows)
            del narrow
        return None, None, None, *(side for term in gradients for side in term.result())


def _zero_ids_in_place(weights: Tensor, local: Tensor, ours: Tensor) -> Tensor:
    """Set the weights (n, V / tp) of the ids, not negative, to 0 in place.

    For `local` and `ours`, (n, k + 1), see :meth:`Columns.locate`.
    """
    # The minimum with infinity leaves column 0 as it is, where it stands for another rank's.
    kept = torch.zeros_like(local, dtype=weights.dtype).masked_fill_(~ours, torch.inf)
    return weights.scatter_reduce_(1, local[:, :-1], kept[:, :-1], "amin")


def _combine_numbers_in_place(
    maximum: Tensor,
    numbers: Tensor,
    ours: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Make the numbers those of all columns, in place; return the maximum over all columns (T,)."""
    numbers[:, :-2].masked_fill_(~ours, 0.0)
    if group is None or group.size() == 1:
        return maximum
    overall = maximum.clone()
    dist.all_reduce(overall, dist.ReduceOp.MAX, group=group)
    shift = maximum - overall
    numbers[:, :-2] += shift[:, None].where(ours, 0.0)
    numbers[:, -2] *= shift.exp()
    numbers[:, -1] *= (shift / temperature).exp()
    dist.all_reduce(numbers, group=group)
    return overall
