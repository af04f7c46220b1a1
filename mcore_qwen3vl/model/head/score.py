"""Models without logits over tokens: classifiers and reward models, and those without a head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.labels import NO_LABELS, Labels
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel


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


class TaskModel(Qwen3VLModel):
    """A model with a :class:`ScoreHead`, or one that ends in the final norm if it has no labels.

    Call it with an ``output_processor``. :meth:`of` makes the class for some labels. Source: HF
    ``GenericForSequenceClassification``; without labels ``Qwen3VL[Moe]Model``, whose
    ``last_hidden_state`` the processor receives. The embedding is tied to no head, so that the last
    pipeline stage needs no copy of it.
    """

    head_labels = NO_LABELS
    seed = 1
    output_layer: Any

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, **kwargs: Any
    ) -> None:
        super().__init__(config, replace(architecture, tie_word_embeddings=False), **kwargs)
        self.architecture = architecture
        if self.post_process:
            self.output_layer = self.build_head(self.output_layer.weight)

    def build_head(self, like: Tensor) -> nn.Module:
        """Return the head, whose weight has the dtype and device of `like`."""
        labels = len(self.head_labels)
        return ScoreHead(self.config, labels, self.seed, like=like) if labels else nn.Identity()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as Megatron's modules do; ``GPTModel`` would look for logits in it."""
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)

    @classmethod
    def of(cls, labels: Labels, seed: int = 1) -> type[Self]:
        """Return the class of models with `labels`, whose new heads have the seed `seed`."""
        return type(cls.__name__, (cls,), {"head_labels": labels, "seed": seed})
