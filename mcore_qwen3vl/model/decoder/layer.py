"""DeepStack in the decoder: under any recompute mode and across any pipeline split.

mcore's ``TransformerBlock`` passes a ``context`` and a ``context_mask`` to every layer, meant for
cross-attention, which this model lacks. We use them for the visual features and their places. That
makes both explicit arguments of every checkpointed region: recompute detaches them and returns
their gradient like that of the hidden states, for any number of layers in a region.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from mcore_qwen3vl.model import fusion
from mcore_qwen3vl.model.recompute import recomputing, remember_outputs_of


class DeepStackLayer(TransformerLayer):
    """A decoder layer that adds visual features to its output if it is one of the first few.

    Source: HF ``Qwen3VLTextModel`` (adds after the layer).

    Args:
        deepstack_layers: K, the number of layers, counted from the first, that have features.
        recomputes: whether to recompute the outputs of norms, SwiGLU and rotary embedding in the
            backward pass, see :mod:`mcore_qwen3vl.model.recompute`. Two modes turn this off. Full
            recompute holds one layer's outputs at a time anyway. Offloading of activations does
            not see the tensors that our hooks replace, and frees those that a recipe needs.
    """

    def __init__(
        self, *args: Any, deepstack_layers: int = 0, recomputes: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.deepstack_layers = deepstack_layers
        offloads = self.config.cpu_offloading or self.config.fine_grained_activation_offloading
        full = self.config.recompute_granularity == "full"
        self.recomputes = recomputes and not offloads and not full
        if self.recomputes:
            attention = self.self_attention
            norms = (attention.q_layernorm, attention.k_layernorm)
            for norm in (self.input_layernorm, self.pre_mlp_layernorm, *norms):
                if not isinstance(norm, IdentityOp):
                    remember_outputs_of(norm)

    def forward(
        self,
        *args: Any,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run mcore's layer; ``context`` and ``context_mask`` carry the DeepStack features.

        Args:
            context: (K - k, n, H) features of the last K - k DeepStack layers, where k of them are
                on earlier pipeline stages; or None.
            context_mask: (n,) int64 rows of the (s_local * B, H) hidden states to add them to.

        Returns:
            (s_local, B, H) hidden states, and `context` for the layers that follow.
        """
        with self.recomputing():
            hidden, _ = super().forward(*args, **kwargs)
        return self.add_features(hidden, context, context_mask), context

    def recomputing(self) -> AbstractContextManager[None]:
        """Recompute this layer's cheap outputs inside this context, unless that is off."""
        return recomputing() if self.recomputes else nullcontext()

    def add_features(
        self, hidden: Tensor, context: Tensor | None, context_mask: Tensor | None
    ) -> Tensor:
        """Add this layer's features, if it has any, to its output (s_local, B, H).

        For `context` and `context_mask` see :meth:`forward`.
        """
        if self.layer_number > self.deepstack_layers or context is None or context_mask is None:
            return hidden
        # Earlier stages keep their layers' features: the last row is always layer K's.
        features = context[self.layer_number - self.deepstack_layers - 1]
        hidden = fusion.add_features(hidden, features, context_mask)
        # The schedules free a stage's output after sending it, and refuse to free a view.
        return make_viewless_tensor(hidden, requires_grad=True, keep_graph=True)


def pack_features(hidden: Tensor, features: Tensor) -> Tensor:
    """Append the features (k, n, H) of later pipeline stages to the states (s_local, B, H).

    Returns:
        (s_local + ceil(k * n / B), B, H), in the dtype of `hidden`.
    """
    batch, width = hidden.shape[1:]
    rows = features.to(hidden.dtype).reshape(-1, width)  # (k * n, H)
    rows = F.pad(rows, (0, 0, 0, -len(rows) % batch))
    return torch.cat([hidden, rows.view(-1, batch, width)])


def unpack_features(
    received: Tensor, seq_len: int, layers: int, count: int
) -> tuple[Tensor, Tensor]:
    """Invert :func:`pack_features`: return (s_local, B, H) and (`layers`, `count`, H)."""
    hidden, rows = received[:seq_len], received[seq_len:]
    features = rows.reshape(-1, rows.shape[-1])[: layers * count]
    return hidden, features.view(layers, count, rows.shape[-1])
