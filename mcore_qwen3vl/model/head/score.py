"""The head of classifiers and reward models: a linear layer instead of logits over tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel


class ScoreHead(nn.Linear):
    """A linear layer to a few labels, replicated on all TP ranks.

    Args:
        config: Megatron's config.
        labels: number of outputs.
        seed: seed of the weights, which are the same under every layout.
        like: tensor whose dtype and device the weight gets.
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


class ClassifierModel(Qwen3VLModel):
    """A model with a :class:`ScoreHead`; call it with an ``output_processor``.

    Source: HF ``GenericForSequenceClassification``. :meth:`of` makes the class for some labels.

    Args:
        config, architecture, kwargs: as for :class:`Qwen3VLModel`. The embedding is tied to no
            head.
    """

    head_labels = 1
    seed = 1
    output_layer: Any

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, **kwargs: Any
    ) -> None:
        super().__init__(config, replace(architecture, tie_word_embeddings=False), **kwargs)
        self.architecture = architecture
        if self.post_process:
            like = self.output_layer.weight
            self.output_layer = ScoreHead(config, self.head_labels or 0, self.seed, like=like)

    @classmethod
    def of(cls, labels: int, seed: int = 1) -> type[ClassifierModel]:
        """Return the class of models with `labels` labels, whose new heads have the seed `seed`."""
        return type(cls.__name__, (cls,), {"head_labels": labels, "seed": seed})
