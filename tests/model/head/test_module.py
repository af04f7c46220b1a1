"""The head refuses layers that it cannot adopt."""

from __future__ import annotations

import pytest
import torch

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.head import Head


def test_another_layer_is_refused() -> None:
    with pytest.raises(BadInput, match=r"The head is a Linear, .* drop fp8_output_proj"):
        Head.adopt(torch.nn.Linear(3, 5), vocab_size=5, chunk=None)
