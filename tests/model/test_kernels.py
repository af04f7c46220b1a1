"""Pointwise functions are compiled only if asked for; weight gradients reach the buffer of DDP."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor, nn

from mcore_qwen3vl.model import kernels
from mcore_qwen3vl.model.decoder.attention import rotate
from mcore_qwen3vl.model.kernels import Pointwise
from mcore_qwen3vl.runtime.launch import run_layout


def test_as_it_is_written_unless_asked_for() -> None:
    calls = []

    @Pointwise
    def doubled(x: Tensor, factor: int = 2) -> Tensor:
        calls.append(x)
        return x * factor

    x = torch.ones(3, requires_grad=True)
    doubled(x, factor=3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 3]
    assert calls[0] is x
    assert not Pointwise.everywhere


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
        kernels.accumulate_weight_gradient(made.weight)
    inputs = torch.randn(2, 7, 5, dtype=torch.float64)
    gradients = []
    for module in (lambda x: kernels.linear(x, made.weight, made.bias), plain):
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


def _results() -> list[Tensor]:
    """Compute rotary embeddings with gradients."""
    torch.manual_seed(2)
    found = []
    for tokens, batch, of_tables, dtype in ((7, 2, 2, torch.float32), (9, 1, 1, torch.bfloat16)):
        x = torch.randn(tokens, batch, 3, 10, dtype=dtype, requires_grad=True)
        cos, sin = torch.rand(2, tokens, of_tables, 1, 5)
        turned = rotate(x, cos, sin)
        turned.backward(torch.randn_like(turned))
        found += [turned, x.grad]
    return [tensor.detach().float() for tensor in found]


def _both() -> tuple[list[Tensor], list[Tensor], int]:
    from torch._dynamo.utils import counters

    written = _results()
    kernels.compile_pointwise()
    compiled = _results()
    assert not counters["graph_break"]
    return written, compiled, counters["frames"]["ok"]


@pytest.mark.slow  # the C++ compiler takes half a minute
def test_compiled_functions_give_the_same() -> None:
    ((written, compiled, frames),) = run_layout(_both, 1, timeout=300)
    assert frames >= 2  # for two kinds of input
    for own, other in zip(compiled, written, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


PROGRAM = """
    import json, os
    from mcore_qwen3vl.simulated_gpu.device import Settings, start_again
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    start_again(Settings())

    import torch
    from mcore_qwen3vl.model import kernels
    from mcore_qwen3vl.model.decoder.attention import rotate
    from mcore_qwen3vl.simulated_gpu.device import Device

    def step():
        on = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        x = torch.empty(64, 2, 4, 16, **on)
        table = torch.empty(64, 1, 1, 8, device="cuda")
        rotate(x, table, table).backward(x.detach())

    device = Device()
    def counted():
        step()  # compiles
        before = device.counters()
        step()
        after = device.counters()
        names = ("launches", "host_syncs", "unknown_calls")
        return {name: after[name] - before[name] for name in names}

    written = counted()
    kernels.compile_pointwise()
    print(json.dumps([written, counted()]))
"""


@pytest.mark.slow
def test_they_are_fewer_kernels_on_the_device() -> None:
    """Triton compiles the kernels for a simulated GPU."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=True
    )
    written, compiled = json.loads(done.stdout.splitlines()[-1])
    assert written["launches"] - compiled["launches"] >= 2 * 2  # two in each direction
    assert (compiled["host_syncs"], compiled["unknown_calls"]) == (0, 0)
