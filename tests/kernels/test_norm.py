"""The kernels of norms do what their eager twins do, as Triton interprets them.

The interpreter shows neither races nor speed. It truncates to bf16, where a GPU rounds to nearest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_qwen3vl.kernels.norm import norm_gradients_eagerly, normalise_eagerly
from mcore_qwen3vl.model.decoder import norm
from tests.kernels.interpreted import interpreted_json

CASES = [
    (dtype, shape, centred, more)
    for dtype in ("float32", "bfloat16")
    for shape in ((3, 5, 7, 37), (2, 1, 4500), (37, 200), (2, 3, 2, 2, 12))
    for centred in (False, True)
    for more in (False, True)
]
MODULES = [(dtype, around_one) for dtype in ("float32", "bfloat16") for around_one in (True, False)]
EPS = 1e-3


def name_of(case: tuple[Any, ...]) -> str:
    return " ".join(map(str, case))


def measure(dtype: str, shape: tuple[int, ...], centred: bool, more: bool) -> dict[str, Any]:
    """Return the largest errors of kernels and of their twins; with `more`, with additions."""
    from mcore_qwen3vl.kernels import norm_triton

    norm_triton.PROGRAMS, norm_triton.TILE = 3, 256  # a program has several tiles
    torch.manual_seed(sum(shape))
    columns = shape[-1]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(getattr(torch, dtype))

    # Rows are part of a larger tensor, and so are their runs, such as the keys' heads of a token.
    *outer, run, _ = shape
    x = (2 * random(*outer, run + 2, columns + 5) + 0.7)[..., 1:-1, 2:-3]
    if len(shape) == 5:  # and rows of three distances are copied
        x = x.transpose(0, 1)
        shape = tuple(x.shape)
    gradient, of_x, added = (random(*shape) for _ in range(3))
    weight, bias = random(columns), random(columns) if centred else None
    offset = 0.0 if centred else 1.0
    others = (added, of_x) if more else (None, None)

    def errors(normalise: Callable[..., Any], backward: Callable[..., Any]) -> dict[str, float]:
        normed, statistics, total = normalise(x, weight, bias, EPS, offset, others[0])
        total = total if more else x
        arguments = gradient, total, weight, statistics, offset, others[1]
        given = backward(*arguments, True)
        frozen, *nothing = backward(*arguments, False)
        assert torch.equal(frozen, given[0])
        assert not any(map(Tensor.numel, nothing))
        exact = _exact(total, weight, bias, offset, gradient, others[1])
        found = {"norm": normed, "rows": given[0], "weight": given[1]}
        found |= {"bias": given[2]} if centred else {}
        found |= {"sum": total}
        exact["sum"] = (x.double() + added.double()) if more else x.double()
        assert found.keys() == exact.keys()
        return {name: _worst(found[name], exact[name]) for name in found}

    kernels = norm_triton.OPERATORS
    return {
        "kernel": errors(kernels.normalise, kernels.norm_gradients),
        "eager": errors(normalise_eagerly, norm_gradients_eagerly),
    }


def _exact(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offset: float,
    gradient: Tensor,
    of_x: Tensor | None,
) -> dict[str, Tensor]:
    """Return the results of PyTorch's norms in float64."""
    given = {"rows": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    wide = {name: value.double().requires_grad_() for name, value in given.items()}
    columns = [x.shape[-1]]
    if bias is None:
        normed = F.rms_norm(wide["rows"], columns, wide["weight"] + offset, EPS)
    else:
        normed = F.layer_norm(wide["rows"], columns, wide["weight"] + offset, wide["bias"], EPS)
    gradients = torch.autograd.grad(normed, list(wide.values()), gradient.double())
    found = dict(zip(wide, gradients, strict=True))
    if of_x is not None:
        found["rows"] = found["rows"] + of_x.double()
    return {"norm": normed.detach(), **found}


def _worst(found: Tensor, exact: Tensor) -> float:
    """Return the largest error, relative to the largest value; nan if one is no number."""
    return float((found - exact).abs().max() / exact.abs().max())


def measure_module(dtype: str, around_one: bool) -> dict[str, float]:
    """Return how far the layer's norm with kernels is from that without, as a layer uses it."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        params_dtype=getattr(torch, dtype),
        layernorm_zero_centered_gamma=not around_one,
    )
    torch.manual_seed(3)
    module = norm.RMSNorm(config, 50, EPS)
    torch.nn.init.normal_(module.weight)
    leaf, factor = (torch.randn(4, 2, 50).to(module.weight) for _ in range(2))

    def run(gives: bool) -> dict[str, Tensor]:
        module.gives_residual, module.weight.grad = gives, None
        x = leaf.clone().requires_grad_()
        result = module(x)
        assert isinstance(result, tuple) == gives
        normed, residual = result if isinstance(result, tuple) else (result, x)
        total = normed * factor + residual
        total.square().sum().backward()
        assert x.grad is not None
        assert module.weight.grad is not None
        return {"total": total.detach(), "rows": x.grad, "weight": module.weight.grad}

    runs = [run(True), run(False)]
    with torch.no_grad():
        alone = module(leaf)
    assert isinstance(alone, Tensor)
    fits, norm.fits = norm.fits, lambda x: False
    wanted = run(False)
    norm.fits = fits
    return {name: max(_worst(made[name], wanted[name]) for made in runs) for name in wanted}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return interpreted_json(__file__)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_kernel_does_what_its_eager_twin_does(
    case: tuple[Any, ...], measured: dict[str, Any]
) -> None:
    found = measured[name_of(case)]
    exact = case[0] == "float32"
    assert all(error < (2e-6 if exact else 2**-8) for error in found["eager"].values())
    assert all(error < (2e-6 if exact else 2**-7) for error in found["kernel"].values())


@pytest.mark.parametrize("case", MODULES, ids=name_of)
def test_the_layers_norm_has_the_numbers_of_pytorchs(
    case: tuple[Any, ...], measured: dict[str, Any]
) -> None:
    limit = 2e-6 if case[0] == "float32" else 2**-6  # results are rounded before they are added
    assert all(error < limit for error in measured[name_of(case)].values())


if __name__ == "__main__":
    found: dict[str, Any] = {name_of(case): measure(*case) for case in CASES}
    print(json.dumps(found | {name_of(case): measure_module(*case) for case in MODULES}))
