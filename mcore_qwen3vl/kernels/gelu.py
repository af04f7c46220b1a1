"""The gradient of GELU in its tanh form, with what a layer's two linears need beside it.

PyTorch has a kernel for each of the three: the activation again for the second weight's gradient,
the activation's gradient, and the sum of that for the first linear's bias. Together they read and
write the same values three times.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.kernels import fits
from mcore_qwen3vl.memory_labels import label_module

label_module(__file__, None)  # what is allocated is the caller's


def gelu_gradient(gradient: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute GELU again, with its gradient.

    Args:
        gradient: (n, C), that of GELU's outputs, in the dtype of `inputs`.
        inputs: (n, C), bf16, fp16 or float32.

    Returns:
        The gradient (n, C) of the inputs; its sums (C,) over the rows; and GELU (n, C), as
        :func:`torch.nn.functional.gelu` gives it with ``approximate="tanh"``. All are in the dtype
        of `inputs`.
    """
    function = _operators().gelu_gradient if fits(inputs) else gelu_gradient_eagerly
    of_inputs, sums, activated = function(gradient, inputs)
    return of_inputs, sums, activated


def _operators() -> torch._ops._OpNamespace:
    from mcore_qwen3vl.kernels import gelu_triton  # importing Triton takes a second

    return gelu_triton.OPERATORS


def gelu_gradient_eagerly(gradient: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do what :func:`gelu_gradient` does, in four kernels."""
    of_inputs = torch.ops.aten.gelu_backward(gradient, inputs, approximate="tanh")
    return of_inputs, of_inputs.sum(0), F.gelu(inputs, approximate="tanh")
