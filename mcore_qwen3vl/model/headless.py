"""The model without a head, for embedding models. Its output is its hidden states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel


class HeadlessModel(Qwen3VLModel):
    """A model that ends in the final norm; call it with an ``output_processor``.

    Source: HF ``Qwen3VL[Moe]Model``, whose ``last_hidden_state`` the processor receives.

    Args:
        config, architecture, kwargs: as for :class:`Qwen3VLModel`. The embedding is tied to no
            head, so that the last pipeline stage needs no copy of it.
    """

    head_labels = 0
    output_layer: Any

    def __init__(
        self, config: TransformerConfig, architecture: Architecture, **kwargs: Any
    ) -> None:
        super().__init__(config, replace(architecture, tie_word_embeddings=False), **kwargs)
        self.architecture = architecture
        if self.post_process:
            self.output_layer = nn.Identity()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as Megatron's modules do; ``GPTModel`` would look for a head in it."""
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)
