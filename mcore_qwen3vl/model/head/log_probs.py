"""Log-probabilities and entropies of tokens, from one chunk of logits at a time.

The logits of 8k tokens with a vocabulary of 152k take 2.5 GB in bf16 and 5 GB in float32, and cross
entropy holds several copies. Here the forward pass reduces each chunk's logits to four numbers per
token, and the backward pass recomputes the logits. That costs one more GEMM of the head, and never
holds more than one chunk. If there is only one chunk, and no entropy is asked for, it is kept.

Ranks of a TP group hold different columns. Each rank reduces its own. Two all-reduces over all
tokens' numbers then combine them, so the loop has none. Gradients are this rank's parts: the caller
must sum those of the hidden states over TP, as with a column-parallel linear layer.

Formulae, with logits l = h W^T / temperature, z = logsumexp(l), p = exp(l - z), H the entropy:
d log p[t] / dl = onehot(t) - p, and dH / dl = -p (l - z + H).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_qwen3vl.model.pointwise import Pointwise
from mcore_qwen3vl.model.weight_gradients import add_product, stand_in

CHUNK_LOGITS = 2**27
"""Number of logits in one chunk: 0.5 GiB in float32."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    columns: Columns,
    *,
    more: Sequence[tuple[Tensor, Tensor]] = (),
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute each target's log-probability, and each position's entropy, in chunks of logits.

    Args:
        hidden: (s, B, H), the same on all ranks of the TP group.
        weight: (V / tp, H) this rank's rows of the head. With Megatron's DDP its gradient is added
            to ``main_grad``, as ``gradient_accumulation_fusion`` does.
        targets: (B, s) integers in [0, V).
        columns: the columns of the vocabulary that this rank's rows compute.
        more: pairs of (s, B, r) and (V / tp, r), such as a low-rank adapter's, whose products are
            added to the logits.
        temperature: divides the logits.
        entropy: whether to compute entropies too.

    Returns:
        Log-probabilities (B, s), and entropies (B, s) or None. Both are float32, the same on all
        ranks, and differentiable with respect to `hidden`, `weight` and all of `more`.
    """
    shape, sides = hidden.shape[:2], flat_sides(hidden, weight, more)
    places = targets.t().reshape(-1)
    found, entropies = _TokenLogProbs.apply(places, columns, temperature, entropy, *sides)
    return found.view(shape).t(), entropies.view(shape).t() if entropy else None


def flat_sides(hidden: Tensor, weight: Tensor, more: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
    """Return the terms of the logits one side after the other, with (T, H) for (s, B, H)."""
    return [side for x, w in ((hidden, weight), *more) for side in (x.flatten(0, 1), w)]


@dataclass(frozen=True)
class Columns:
    """This TP rank's part of the vocabulary, whose logits are computed a chunk of tokens at a time.

    Attributes:
        first, count: its columns: `count` from `first` on, without padding.
        chunk: tokens per chunk; None: as many as give :data:`CHUNK_LOGITS`.
        group: TP group; None: one rank.
    """

    first: int
    count: int
    chunk: int | None = None
    group: dist.ProcessGroup | None = None

    def chunks(self, tokens: int) -> list[slice]:
        """Return the chunks of `tokens` positions; none if this rank has only padding."""
        if self.count == 0:
            return []
        size = self.chunk or max(CHUNK_LOGITS // self.count, 1)
        return [slice(start, start + size) for start in range(0, tokens, size)]

    def logits(
        self, terms: Sequence[tuple[Tensor, Tensor]], rows: slice, temperature: float = 1.0
    ) -> Tensor:
        """Return logits (n, own columns), float32, which may be changed in place.

        They are the sum of the products of `terms`: hidden states (T, H) and rows (V / tp, H).
        """
        (hidden, weight), *others = terms
        logits = hidden[rows] @ weight[: self.count].t()
        for x, w in others:
            logits.addmm_(x[rows], w[: self.count].t())
        return logits.float() if temperature == 1 else logits.float().div_(temperature)

    def find(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return each target's local column, 0 if another rank has it, and whether it is ours."""
        local = targets - self.first
        ours = (local >= 0) & (local < self.count)
        return local.where(ours, 0), ours


class _TokenLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies, (T,) each, of targets (T,).

    Each further pair of arguments is one term of the logits: (T, H) and (V / tp, H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        targets: Tensor,
        columns: Columns,
        temperature: float,
        entropy: bool,
        *sides: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.exponentials = None
        terms, hidden = in_pairs(sides), sides[0]
        local, ours = columns.find(targets)
        # Numbers of this rank's columns. `maximum` is their maximum. `sums` has the sum of
        # exponentials relative to it, the target's logit, and the sum of logits, relative too,
        # weighted by the exponentials. A rank that has only padding keeps the neutral elements.
        lowest = torch.finfo(torch.float32).min
        maximum = hidden.new_full((len(hidden),), lowest, dtype=torch.float32)
        sums = hidden.new_zeros((3, len(hidden)), dtype=torch.float32)
        runs = columns.chunks(len(hidden))
        for rows in runs:
            logits = columns.logits(terms, rows, temperature)
            _reduce(logits, local[rows], maximum[rows], sums[:, rows], entropy)
            if len(runs) == 1 and not entropy and any(ctx.needs_input_grad):
                ctx.exponentials = logits
            del logits  # before the next chunk's are computed
        sums[1].masked_fill_(~ours, 0.0)
        total, target, entropies = _combine(maximum, sums, columns.group)
        ctx.columns, ctx.temperature, ctx.entropy = columns, temperature, entropy
        ctx.save_for_backward(local, ours, total, entropies, maximum, *sides)
        return target - total, entropies if entropy else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_log_probs: Tensor, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        local, ours, total, entropies, maximum, *sides = ctx.saved_tensors
        terms, wanted = in_pairs(sides), in_pairs(ctx.needs_input_grad[4:])
        columns, temperature = ctx.columns, ctx.temperature
        of_log_probs = of_log_probs / temperature
        of_target = of_log_probs.where(ours, 0.0)
        gradients = [
            TermGradient(x, w, *of_term) for (x, w), of_term in zip(terms, wanted, strict=True)
        ]
        kept, ctx.exponentials = ctx.exponentials, None
        for rows in columns.chunks(len(local)):
            factor = -of_log_probs[rows, None]
            if kept is not None:
                gradient = kept.mul_((maximum - total).exp_()[:, None] * factor)
                kept = None
            else:
                logits = columns.logits(terms, rows, temperature)
                if ctx.entropy and of_entropies is not None:
                    of_entropy = of_entropies[rows, None] / temperature
                    offset = (entropies - total)[rows, None]
                    factor = factor - (logits + offset).mul_(of_entropy)
                gradient = _scaled_exponentials(logits, total[rows, None], factor)
                del logits
            row = torch.arange(len(gradient), device=gradient.device)
            gradient[row, local[rows]] += of_target[rows]
            narrow = gradient.to(sides[0].dtype)
            del factor, gradient
            for of_term in gradients:
                of_term.add(narrow, rows)
            del narrow
        return None, None, None, None, *(side for of_term in gradients for side in of_term.result())


def in_pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Undo :func:`flat_sides`."""
    return list(zip(flat[::2], flat[1::2], strict=True))


@Pointwise
def _scaled_exponentials(logits: Tensor, total: Tensor, factor: Tensor) -> Tensor:
    """Compute ``exp(logits - total) * factor`` in place, (n, V)."""
    return logits.sub_(total).exp_().mul_(factor)


@Pointwise
def _reduce(logits: Tensor, targets: Tensor, maximum: Tensor, sums: Tensor, entropy: bool) -> None:
    """Write the numbers of one chunk of n tokens into `maximum` (n,) and `sums` (3, n)."""
    maximum.copy_(logits.amax(-1))
    sums[1] = logits.gather(1, targets[:, None]).squeeze(1)
    shifted = logits.sub_(maximum[:, None])
    if not entropy:
        sums[0] = shifted.exp_().sum(-1)
        return
    weights = shifted.exp()
    sums[0] = weights.sum(-1)
    sums[2] = weights.mul_(shifted).sum(-1)


def _combine(
    maximum: Tensor, sums: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, over all columns, the logsumexp, the target's logit and the entropy, (T,) each."""
    overall = maximum
    if group is not None and group.size() > 1:
        overall = maximum.clone()
        dist.all_reduce(overall, dist.ReduceOp.MAX, group=group)
        shift = maximum - overall
        sums[2] += shift * sums[0]
        sums[::2] *= shift.exp()
        dist.all_reduce(sums, group=group)
    exponentials, target, moment = sums
    log_sum = exponentials.log()
    return overall + log_sum, target, log_sum - moment / exponentials


class TermGradient:
    """Accumulates the gradients of one term of the logits, as far as they are needed.

    The head's is summed over chunks in float32, or in Megatron's ``main_grad``.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, of_hidden: bool, of_weight: bool) -> None:
        self._hidden, self._weight = hidden, weight
        self._of_hidden = torch.zeros_like(hidden) if of_hidden else None
        self._of_weight: Tensor | None = None
        # Megatron's protocol for kernels that add to the gradient buffer directly.
        buffer = getattr(weight, "main_grad", None)
        self._direct = buffer is not None and hasattr(weight, "grad_added_to_main_grad")
        if of_weight:
            zeros = torch.zeros_like
            self._of_weight = buffer if self._direct else zeros(weight, dtype=torch.float32)

    def add(self, of_logits: Tensor, rows: slice) -> None:
        columns = of_logits.shape[1]
        if self._of_hidden is not None:
            torch.mm(of_logits, self._weight[:columns], out=self._of_hidden[rows])
        if self._of_weight is not None:
            add_product(self._of_weight[:columns], of_logits.t(), self._hidden[rows])

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients for autograd."""
        if self._of_weight is None:
            return self._of_hidden, None
        if not self._direct:
            return self._of_hidden, self._of_weight.to(self._weight.dtype)
        return self._of_hidden, stand_in(self._weight)
