"""Pointwise functions are compiled only if asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.model import pointwise
from mcore_qwen3vl.model.decoder.attention import rotate
from mcore_qwen3vl.model.pointwise import Pointwise
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
    pointwise.compile_pointwise()
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
    from mcore_qwen3vl.model import pointwise
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
    pointwise.compile_pointwise()
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
