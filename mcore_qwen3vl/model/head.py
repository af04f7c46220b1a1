"""The head: logits, and what a loss makes of them without holding them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.log_probs import Columns
from mcore_qwen3vl.model.lora_modules import Site

label_module(__file__, "logits and loss")

Reduce = Callable[..., tuple[Tensor, Tensor | None]]
"""Computes two results from hidden states and a head, without holding all logits."""


class Head(ColumnParallelLinear):
    """This TP rank's rows of the head."""

    vocab_size: int  # over all ranks, without padding
    chunk: int | None  # see `Columns`
    adapter: Site | None  # its product is added to the logits

    @classmethod
    def adopt(cls, output_layer: Any, *, vocab_size: int, chunk: int | None) -> None:
        """Turn the ``ColumnParallelLinear`` that ``GPTModel`` has built into a head, in place.

        The object stays the same, because ``GPTModel`` has tied and marked its weight. The weight
        must be used inside the module's call: Megatron's DDP waits there for its parameter gather.

        Raises:
            BadInput: `output_layer` is another layer, such as Megatron's FP8 head.
        """
        if type(output_layer) is not ColumnParallelLinear:
            raise BadInput(
                f"The head is a {type(output_layer).__name__}, whose padded columns cannot be "
                "masked: drop fp8_output_proj (--fp8-output-proj)."
            )
        output_layer.__class__ = cls
        output_layer.vocab_size = vocab_size
        output_layer.chunk = chunk
        output_layer.adapter = None

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        reduce: Reduce | None = None,
        tokens: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute logits as ``ColumnParallelLinear`` does, or what `reduce` makes of them.

        Args:
            input_: (s_local, B, H) hidden states, divided over TP under sequence parallelism. With
                `tokens`: (N, H) hidden states, which all TP ranks have.
            weight: (V / tp, H) weight of a tied head.
            runtime_gather_output: whether to gather the logits over TP.
            reduce: a function with the arguments of :func:`.log_probs.token_log_probs`, its own
                ones bound: it gets `hidden`, `weight`, `columns` and `more`.
            tokens: token ids whose logits to return, without an adapter's product.

        Returns:
            Logits (s, B, V / tp), -inf at padded columns, and the bias, None. With `reduce`: what
            it returns. With `tokens`: their logits (N, tokens), float32, equal on all TP ranks,
            and None.
        """
        weight = self.weight if weight is None else weight
        assert weight is not None
        if tokens is not None:
            return self._logits_of(tokens, input_, weight), None
        if reduce is None:
            logits, bias = super().forward(input_, weight, runtime_gather_output)
            if self.adapter is not None:
                logits = self.adapter.add(input_, logits)
            gathered = logits.shape[-1] == self.output_size
            count = self.vocab_size if gathered else self.columns.count
            return _Mask.apply(logits, count) if count < logits.shape[-1] else logits, bias
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        adapter = self.adapter if self.adapter and self.adapter.is_active else None
        more = [adapter.scaled_factors(input_)] if adapter else []
        return reduce(hidden, weight, columns=self.columns, more=more)

    def _logits_of(self, tokens: Sequence[int], hidden: Tensor, weight: Tensor) -> Tensor:
        """Each logit is computed by the TP rank that holds its row; the others add zero."""
        columns = self.columns
        rows = torch.tensor(tokens) - columns.first
        is_here = to_device((rows >= 0) & (rows < columns.count), weight.device)
        rows = to_device(rows.clamp(0, len(weight) - 1), weight.device)
        hidden = copy_to_tensor_model_parallel_region(hidden.float(), group=self.tp_group)
        logits = hidden @ (weight.index_select(0, rows).float() * is_here[:, None]).T
        return reduce_from_tensor_model_parallel_region(logits, group=self.tp_group)

    @property
    def columns(self) -> Columns:
        """This rank's columns of the vocabulary."""
        first = self.tp_group.rank() * self.output_size_per_partition
        count = min(max(self.vocab_size - first, 0), self.output_size_per_partition)
        return Columns(first, count, self.chunk, self.tp_group)


class _Mask(torch.autograd.Function):
    """Gives the columns after the first `columns` the logit -inf and no gradient.

    They only pad the vocabulary to a divisible size. Megatron's cross entropy normalises over them
    too, so that its value and gradients would depend on ``--make-vocab-size-divisible-by``. Losses,
    samples and gradients are now those of the unpadded head, exactly. It works in place, because
    the logits are the largest tensor of all.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: int) -> Tensor:
        ctx.columns = columns
        ctx.mark_dirty(logits)
        logits[..., columns:] = -torch.inf
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient[..., ctx.columns :] = 0
        return gradient, None


class ScoreHead(nn.Linear):
    """A linear layer to a few labels, replicated on all TP ranks.

    Its weights depend on `seed` alone, not on the layout; dtype and device are those of `like`.
    """

    def __init__(self, config: TransformerConfig, labels: int, seed: int, *, like: Tensor) -> None:
        super().__init__(
            config.hidden_size, labels, bias=False, dtype=like.dtype, device=like.device
        )
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(labels, config.hidden_size, generator=generator)
        with torch.no_grad():
            self.weight.copy_(first * config.init_method_std)

    def forward(self, input_: Tensor) -> Tensor:
        """Map states (N, H) to (N, labels) float32: so few products cost nothing."""
        return input_.float() @ self.weight.float().T
