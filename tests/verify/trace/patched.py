"""Mistakes in the decoder's code, for as long as a context is entered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch import Tensor

from mcore_qwen3vl.model.decoder.layer import DeepStackLayer


def deepstack(
    change: Callable[[Tensor], Tensor], layer: int | None = None
) -> AbstractContextManager[Any]:
    """Let one decoder layer (counted from 1), or every one, add changed DeepStack features."""
    forward = DeepStackLayer.forward

    def changed(self: Any, *args: Any, context: Tensor | None = None, **kwargs: Any) -> Any:
        wrong = context is not None and layer in (None, self.layer_number)
        features = change(context) if wrong else context
        return forward(self, *args, context=features, **kwargs)[0], context

    return mock.patch.object(DeepStackLayer, "forward", changed)
