"""The losses of single tokens: cross entropy and its weightings, and functions of a user's own.

Each has a name: ours, those of entry points, and any ``module:function``. One turns this rank's
per-token cross entropies into a sum and a normaliser. Both are added up over micro-batches, DP and
CP, and divided once, so the loss is a mean over the whole global batch, never a mean of means. The
default's normaliser is the number of trained tokens, like HF's ``num_items_in_batch``.

To add one, write ``def my_loss(losses, weights)`` and pass ``--loss my_package.losses:my_loss``, or
register it as an entry point of the group ``mcore_qwen3vl.losses`` and pass its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.functions import find_function
from mcore_qwen3vl.lazy import Lazy
from mcore_qwen3vl.losses.loss import Loss
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.losses import reduction
    from mcore_qwen3vl.losses.reduction import Objective, Reduced
    from mcore_qwen3vl.model import inputs as model_inputs
else:
    torch = Lazy("torch")
    model_inputs = Lazy("mcore_qwen3vl.model.inputs")
    reduction = Lazy("mcore_qwen3vl.losses.reduction")

label_module(__file__, "logits and loss")

GROUP = "mcore_qwen3vl.losses"
"""The entry points of functions ``(losses, weights) -> (sum, normaliser)``."""


@dataclass(frozen=True)
class TokenLoss(Loss):
    """The losses of single tokens; they have no settings."""

    names = ("cross_entropy", "weighted_cross_entropy", "scaled_cross_entropy")
    help = (
        "a registered loss, module:function or file.py:function (see mcore_qwen3vl.losses.tokens)"
    )
    logged = ("lm loss",)
    takes_mtp = True

    def summary(self, run: RunSettings, lora: LoraSettings) -> list[tuple[str, str]]:
        return []  # the log's name says it

    def objective(self, run: RunSettings, lora: LoraSettings) -> Objective:
        function = find_loss(self.name)
        if run.loop.mtp_num_layers:
            return mtp_objective(function, run.loop.mtp_loss_scaling_factor)
        return token_objective(function)


LossFunction = Callable[["Tensor", "Tensor"], tuple["Tensor", "Tensor"]]
"""``(losses, weights) -> (sum, normaliser)``.

Args:
    losses: (B, s) float32 cross entropy of each local position.
    weights: (B, s) float32 weight of each position's label; 0 if it is not trained.

Returns:
    The sum to minimise, a float32 scalar with a gradient; and its normaliser, a non-negative scalar
    of any dtype without a gradient. Both are summed over the global batch before the division.
"""


def token_objective(loss: LossFunction) -> Objective:
    """Return the objective of a loss over single tokens."""

    def objective(batch: Batch, local: Tensor, losses: Tensor) -> Reduced:
        positions = model_inputs.to_device(local, losses.device)
        weights = batch.loss_weights.index_select(1, positions)
        total, normaliser = _checked_result(loss, loss(losses, weights))
        data_sets = _weights_of_data_sets(batch, positions, weights)
        parts = {name: loss(losses.detach(), part) for name, part in data_sets.items()}
        return reduction.Reduced(total, normaliser, {"lm loss": total.detach()}, parts)

    return objective


def mtp_objective(loss: LossFunction, factor: float) -> Objective:
    """Return the objective of `loss` over the next token and, times `factor`, the one after it.

    It takes (2, B, s) losses of both. Both sums have the normaliser of the first, the trained
    tokens of the global batch. Megatron divides the second by its own number of tokens in each
    micro-batch and on each CP rank, so that its weight depends on the layout.
    """
    next_token = token_objective(loss)

    def objective(batch: Batch, local: Tensor, losses: Tensor) -> Reduced:
        reduced = next_token(batch, local, losses[0])
        weights = batch.loss_weights.roll(-1, 1)
        last = (
            torch.tensor([batch.input_ids.shape[1]])
            if batch.cu_seqlens is None
            else batch.cu_seqlens[1:]
        )
        # The roll has given the last position of a sequence the weight of some first token.
        weights.index_fill_(1, model_inputs.to_device(last.long() - 1, weights.device), 0.0)
        weights = weights.index_select(1, model_inputs.to_device(local, weights.device))
        total, normaliser = _checked_result(loss, loss(losses[1], weights))
        return reduced._replace(
            total=reduced.total + factor * total,
            sums={
                **reduced.sums,
                "mtp_1 loss": torch.stack([total.detach(), normaliser.to(total.dtype)]),
            },
        )

    return objective


def _weights_of_data_sets(batch: Batch, positions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Return `weights` (B, s) for each data set of the batch, with 0 for the tokens of others."""
    names = list(dict.fromkeys(batch.data_sets))
    if len(names) < 2:
        return dict.fromkeys(names, weights)
    sequences = batch.sequences()
    # Sequences that are all padding come last, and belong to no data set.
    numbers = torch.full((int(sequences.max()) + 1,), -1)
    numbers[: len(batch.data_sets)] = torch.tensor([names.index(one) for one in batch.data_sets])
    number = model_inputs.to_device(numbers[sequences], weights.device).index_select(1, positions)
    return {name: weights.where(number == i, 0.0) for i, name in enumerate(names)}


def _checked_result(loss: LossFunction, result: Any) -> tuple[Tensor, Tensor]:
    """Return the result of a loss function, or raise BadInput if it is no pair of scalars."""
    returned = _describe_type(result)
    if isinstance(result, tuple) and len(result) == 2:
        if all(isinstance(value, torch.Tensor) and value.ndim == 0 for value in result):
            return result
        returned = f"({', '.join(map(_describe_type, result))})"
    name = getattr(loss, "__qualname__", repr(loss))
    raise BadInput(
        f"The loss function {name} returned {returned}. It must return a pair of scalar tensors: "
        "(sum over this rank's tokens, normaliser). Return (loss.sum(), number_of_tokens), not "
        "their ratio."
    )


def _describe_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a value of type {type(value).__name__}"


def cross_entropy(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over trained tokens and their number: each of them counts the same."""
    trained = weights > 0
    return _masked_sum(losses, trained.to(losses.dtype)), trained.sum()


def weighted_cross_entropy(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum and the sum of weights: weight 2 counts like two tokens of weight 1.

    Megatron divides by ``loss_mask.sum()`` in the same way, and torch's
    ``cross_entropy(weight=...)`` by its weights. If all weights are 2, nothing changes.
    """
    return _masked_sum(losses, weights), weights.sum()


def scaled_cross_entropy(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum and the number of trained tokens, so that weights scale gradients.

    HF's ``num_items_in_batch`` does the same to losses that were multiplied by weights. If all
    weights are 2, the gradient doubles.
    """
    return _masked_sum(losses, weights), (weights > 0).sum()


BUILT_IN: dict[str, LossFunction] = {
    "cross_entropy": cross_entropy,
    "weighted_cross_entropy": weighted_cross_entropy,
    "scaled_cross_entropy": scaled_cross_entropy,
}


def find_loss(name: str) -> LossFunction:
    """Return the function called `name`, or raise BadInput if it cannot be imported."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    entry = None if ":" in name else registered()[name]
    named = name if entry is None else f"{entry.module}:{entry.attr}"
    try:
        return cast(LossFunction, find_function(named, "losses", "weights"))
    except BadInput as error:
        raise BadInput(f"--loss {error}") from error


def registered() -> dict[str, Any]:
    """Return the functions that other packages register, as entry points by their names."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _masked_sum(losses: Tensor, weights: Tensor) -> Tensor:
    # Padding is masked before the product: its loss may be infinite, and 0 * inf is NaN.
    return (losses.where(weights > 0, 0.0) * weights).sum()
