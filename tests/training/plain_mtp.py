"""The MTP layer, of the parts of transformers, which has no such layer.

The embedding of the next token and the hidden state, each normed, go side by side through a linear
layer, then a decoder layer with attention, a norm and the model's head. Source: vLLM's
``Qwen3_5MultiTokenPredictor``, which reads what is exported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class PlainMTP(nn.Module):
    """The layer of `checkpoint`, beside transformers' `model`."""

    def __init__(self, checkpoint: Path, model: Any) -> None:
        super().__init__()
        self.text = [model.model.language_model]  # not a child
        text, config = self.text[0], model.config.text_config
        attention = config.layer_types.index("full_attention")
        norm = lambda: type(text.norm)(config.hidden_size, config.rms_norm_eps)  # noqa: E731
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([type(text.layers[0])(config, attention)])
        self.norm, self.pre_fc_norm_hidden, self.pre_fc_norm_embedding = norm(), norm(), norm()
        start = "mtp."
        tensors = load_file(checkpoint / "model.safetensors").items()
        self.load_state_dict({n.removeprefix(start): t for n, t in tensors if n.startswith(start)})

    def forward(self, hidden: Tensor, embeddings: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return states (n - 1, H) of (1, n, H) states and embeddings, of which the first misses.

        State i comes of the hidden state of token i and the embedding of token i + 1.
        """
        both = (
            self.pre_fc_norm_embedding(embeddings[:, 1:]),
            self.pre_fc_norm_hidden(hidden[:, :-1]),
        )
        states = self.fc(torch.cat(both, -1))
        length = states.shape[1]
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        cos, sin = (angle[:, :length] for angle in angles)
        states = self.layers[0](states, position_embeddings=(cos, sin), attention_mask=mask)
        return self.norm(states)[0]
