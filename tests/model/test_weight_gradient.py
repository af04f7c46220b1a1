"""Weight gradients reach the buffer of DDP."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mcore_qwen3vl.model import weight_gradient


@pytest.mark.parametrize(("has_buffer", "is_marked"), [(True, True), (True, False), (False, True)])
def test_a_linear_adds_its_weights_gradient_to_the_buffer(
    has_buffer: bool, is_marked: bool
) -> None:
    """It does so if it is marked, as ``--no-gradient-accumulation-fusion`` marks none."""
    is_accumulated = has_buffer and is_marked
    torch.manual_seed(1)
    made, plain = (nn.Linear(5, 3).double() for _ in range(2))
    plain.load_state_dict(made.state_dict())
    if has_buffer:
        made.weight.main_grad = torch.ones(3, 5, dtype=torch.float64)
        made.weight.grad_added_to_main_grad = False
    if is_marked:
        weight_gradient.accumulate_weight_gradient(made.weight)
    inputs = torch.randn(2, 7, 5, dtype=torch.float64)
    gradients = []
    for module in (lambda x: weight_gradient.linear(x, made.weight, made.bias), plain):
        x = inputs.clone().requires_grad_()
        output = module(x)
        output.sin().sum().backward()
        gradients.append([output.detach(), x.grad])
    found = made.weight.main_grad - 1 if is_accumulated else made.weight.grad
    assert made.weight.grad is not None  # its arrival is what DDP waits for
    assert getattr(made.weight, "grad_added_to_main_grad", False) == is_accumulated
    gradients[0] += [found, made.bias.grad]
    gradients[1] += [plain.weight.grad, plain.bias.grad]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
