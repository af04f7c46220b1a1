"""Log-probabilities of tokens, computed from hidden states without holding all logits.

They and their entropies are computed from one chunk of logits at a time. The logits of 8k tokens
with a vocabulary of 152k take 2.5 GB in bf16 and 5 GB in float32, and cross entropy holds several
copies. Here the forward pass reduces each chunk's logits to four numbers per token. The backward
pass needs the logits again, and gets them in one of three ways:

- If the head is frozen, as with LoRA, it does not need them. The forward pass multiplies each
  chunk's probabilities by the head's rows at once. The gradient of a token's hidden state is that
  product times a number, which the backward pass knows.
- While the device has room (:data:`LEFT_FREE`), chunks are kept in the states' dtype.
- Otherwise they are computed again, which costs one more GEMM of the head.

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

from mcore_qwen3vl.kernels import fits
from mcore_qwen3vl.kernels.log_probs import reduce_logits, write_gradient
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.weight_gradient import add_product, stand_in_gradient

label_module(__file__, "logits and loss")

CHUNK_BYTES = 2**29
"""Size of the logits in one chunk: 0.5 GiB in the dtype in which they are reduced."""

LEFT_FREE = 0.2
"""Share of a GPU's memory that chunks of logits kept for the backward pass leave free."""


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
    # Inside the function nothing says so, and a parameter wants a gradient always.
    differentiable = torch.is_grad_enabled() and any(side.requires_grad for side in sides)
    log_probs, entropies = _TokenLogProbs.apply(
        places, columns, temperature, entropy, differentiable, *sides
    )
    return log_probs.view(shape).t(), entropies.view(shape).t() if entropy else None


def flat_sides(hidden: Tensor, weight: Tensor, more: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
    """Return the terms of the logits one side after the other, with (T, H) for (s, B, H)."""
    return [side for x, w in ((hidden, weight), *more) for side in (x.flatten(0, 1), w)]


@dataclass(frozen=True)
class Columns:
    """This TP rank's part of the vocabulary, whose logits are computed a chunk of tokens at a time.

    Attributes:
        first, count: its columns: `count` from `first` on, without padding.
        chunk: tokens per chunk; None: as many as give :data:`CHUNK_BYTES`.
        group: TP group; None: one rank.
    """

    first: int
    count: int
    chunk: int | None = None
    group: dist.ProcessGroup | None = None

    def chunks(self, tokens: int, of_logit: int = 4) -> list[slice]:
        """Return the chunks of `tokens` positions; none if this rank has only padding.

        `of_logit` is the size in bytes of a logit.
        """
        if self.count == 0:
            return []
        size = self.chunk or max(CHUNK_BYTES // (self.count * of_logit), 1)
        return [slice(start, start + size) for start in range(0, tokens, size)]

    def products(self, terms: Sequence[tuple[Tensor, Tensor]], rows: slice) -> Tensor:
        """Return logits (n, own columns) in the states' dtype, which may be changed in place.

        They are the sum of the products of `terms`: hidden states (T, H) and rows (V / tp, H).
        """
        (hidden, weight), *others = terms
        logits = hidden[rows] @ weight[: self.count].t()
        for x, w in others:
            logits.addmm_(x[rows], w[: self.count].t())
        return logits

    def logits(
        self, terms: Sequence[tuple[Tensor, Tensor]], rows: slice, temperature: float = 1.0
    ) -> Tensor:
        """Return the same in float32, divided by the temperature."""
        logits = self.products(terms, rows).float()
        return logits if temperature == 1 else logits.div_(temperature)

    def locate(self, targets: Tensor) -> tuple[Tensor, Tensor]:
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
        differentiable: bool,
        *sides: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        terms, hidden = in_pairs(sides), sides[0]
        wanted = in_pairs(ctx.needs_input_grad[5:])
        is_frozen = not any(of_weight for _, of_weight in wanted)
        mixtures: list[Tensor | None] = []
        if differentiable and is_frozen and not entropy:
            mixtures = [
                torch.zeros_like(x, dtype=torch.float32) if of_x else None
                for (x, _), (of_x, _) in zip(terms, wanted, strict=True)
            ]
        local, ours = columns.locate(targets)
        # Numbers of this rank's columns. `maximum` is their maximum. `sums` has the sum of
        # exponentials relative to it, the target's logit, and the sum of logits, relative too,
        # weighted by the exponentials. A rank that has only padding keeps the neutral elements.
        lowest = torch.finfo(torch.float32).min
        maximum = hidden.new_full((len(hidden),), lowest, dtype=torch.float32)
        sums = hidden.new_zeros((3, len(hidden)), dtype=torch.float32)
        room = _bytes_for_kept_logits(hidden.device) if differentiable and not mixtures else 0
        kept: dict[int, Tensor] = {}
        for rows in columns.chunks(len(hidden), _size_of_logit(hidden)):
            logits = columns.products(terms, rows)
            reduce_logits(logits, local[rows], temperature, maximum[rows], sums[:, rows], entropy)
            if mixtures:
                # Exponentials relative to the maximum, and none for the target.
                of_target = -(sums[1, rows] - maximum[rows]).exp_().where(ours[rows], 0.0)
                numbers = (maximum[rows], torch.full_like(of_target, -1.0), of_target)
                write_gradient(logits, local[rows], temperature, *numbers)
                for mixture, (_, weight) in zip(mixtures, terms, strict=True):
                    if mixture is not None:
                        add_product(mixture[rows], logits, weight[: columns.count])
            elif logits.nbytes <= room:
                kept[rows.start] = logits
                room -= logits.nbytes
            del logits  # before the next chunk's are computed
        sums[1].masked_fill_(~ours, 0.0)
        total, target, entropies = _combine_over_ranks(maximum, sums, columns.group)
        ctx.columns, ctx.temperature, ctx.kept = columns, temperature, kept
        ctx.with_entropy, ctx.is_mixed = entropy, bool(mixtures)
        ctx.save_for_backward(local, ours, total, target, entropies, maximum, *sides, *mixtures)
        return target - total, entropies if entropy else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        local, ours, total, target, entropies, maximum, *rest = ctx.saved_tensors
        columns, wanted = ctx.columns, in_pairs(ctx.needs_input_grad[5:])
        terms, mixtures = in_pairs(rest[: 2 * len(wanted)]), rest[2 * len(wanted) :]
        grad_log_probs = grad_log_probs / ctx.temperature
        grad_target = grad_log_probs.where(ours, 0.0)
        if ctx.is_mixed:
            # 1 - p of the target, which is lost where p is rounded to the states' dtype.
            grad_target = grad_target * -torch.expm1(target - total)
            grad_others = grad_log_probs * (maximum - total).exp_()
            factors = local, grad_target, grad_others
            pairs = zip(terms, mixtures, strict=True)
            found = [
                side for term, mixed in pairs for side in (_of_states(*term, mixed, *factors), None)
            ]
            return None, None, None, None, None, *found
        grad_entropies = grad_entropies / ctx.temperature if ctx.with_entropy else None
        gradients = [
            TermGradient(x, w, *of_term) for (x, w), of_term in zip(terms, wanted, strict=True)
        ]
        for rows in columns.chunks(len(local), _size_of_logit(rest[0])):
            logits = ctx.kept.pop(rows.start, None)  # the gradient takes its place
            if logits is None:
                logits = columns.products(terms, rows)
            numbers = [total[rows], grad_log_probs[rows], grad_target[rows]]
            if grad_entropies is not None:
                numbers += [grad_entropies[rows], entropies[rows]]
            write_gradient(logits, local[rows], ctx.temperature, *numbers)
            for of_term in gradients:
                of_term.add(logits, rows)
            del logits
        found = [side for of_term in gradients for side in of_term.result()]
        return None, None, None, None, None, *found


def _of_states(
    states: Tensor,
    weight: Tensor,
    mixture: Tensor | None,
    local: Tensor,
    of_target: Tensor,
    of_others: Tensor,
) -> Tensor | None:
    """Return the gradient of a term's states (T, H): the targets' rows less the mixtures of others.

    The factors of both are (T,).
    """
    if mixture is None:
        return None
    gradient = mixture * -of_others[:, None]
    gradient.addcmul_(weight.index_select(0, local), of_target[:, None])
    return gradient.to(states.dtype)


def _bytes_for_kept_logits(device: torch.device) -> int:
    """Return how many bytes of logits may be kept for the backward pass.

    Results do not depend on it: a chunk that is computed again is the same.
    """
    if device.type != "cuda":
        return CHUNK_BYTES
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached - int(LEFT_FREE * total)


def _size_of_logit(states: Tensor) -> int:
    """Return the bytes of a logit; eager code needs them in float32."""
    return states.element_size() if fits(states) else 4


def in_pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Undo :func:`flat_sides`."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def _combine_over_ranks(
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
        """Add what a chunk's `of_logits` (n, own columns) gives; they are in the states' dtype."""
        columns = of_logits.shape[1]
        if self._of_hidden is not None:  # written, not added: each row is in one chunk only
            torch.mm(of_logits, self._weight[:columns], out=self._of_hidden[rows])
        if self._of_weight is not None:
            add_product(self._of_weight[:columns], of_logits.t(), self._hidden[rows])

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients for autograd."""
        if self._of_weight is None:
            return self._of_hidden, None
        if not self._direct:
            return self._of_hidden, self._of_weight.to(self._weight.dtype)
        return self._of_hidden, stand_in_gradient(self._weight)
