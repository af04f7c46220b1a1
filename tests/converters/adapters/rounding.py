"""Bounds on the error of an adapter's update in float32, whatever the order of the sums.

The bits of a matrix product depend on the library, the processor, the number of rows and where the
operands lie in memory. The bound on its error does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl.converters.adapters.adapter import Adapter, Factors, factors_of_expert

UNIT = torch.finfo(torch.float32).eps / 2
"""Largest relative error of one rounding in float32."""


def update_range(factors: Factors) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest s·B·A that float32 may give, from the sum in float64.

    A term is rounded at most r + 1 times: in its product, r - 1 sums, the scaling. The error is
    within γ·|s|·|B|·|A| with γ = nu / (1 - nu), n = r + 1 (Higham, Accuracy and Stability of
    Numerical Algorithms, 3.1).

    Returns:
        Two float32 tensors (out, in), or (E, out, in) for fused experts.
    """
    experts = factors.a.shape[0] // factors.r
    pairs = [factors_of_expert(factors, index) for index in range(experts)]
    exact, size = (
        torch.stack([how(b.double()) @ how(a.double()) for a, b in pairs])
        for how in (torch.clone, torch.abs)
    )
    roundings = (factors.r + 1) * UNIT
    error = roundings / (1 - roundings) * abs(factors.scaling) * size
    low, high = (factors.scaling * exact - error).float(), (factors.scaling * exact + error).float()
    return (low, high) if experts > 1 else (low[0], high[0])


def is_merged(found: Tensor, weight: Tensor, factors: Factors) -> bool:
    """Return whether `found` is W + s·B·A, summed in float32 and rounded to its dtype once.

    Rounding keeps order, so a value within the range before rounding is within it after.

    Args:
        found, weight: (out, in), or (E, out, in) for fused experts.
    """
    low, high = ((weight.float() + end).to(found.dtype) for end in update_range(factors))
    return bool(((low <= found) & (found <= high)).all())


def assert_merged(found: dict[str, Tensor], base: dict[str, Tensor], adapter: Adapter) -> None:
    """Check that tensors with factors are W + s·B·A within rounding, and all others bit for bit.

    Args:
        found, base: tensors by name, experts in the layout of transformers 5.
    """
    assert adapter.factors
    assert adapter.factors.keys() <= found.keys()
    for name, tensor in found.items():
        weight = adapter.saved.get(name, base.get(name))
        assert weight is not None, name
        if name in adapter.factors:
            assert is_merged(tensor, weight, adapter.factors[name]), name
        else:
            assert torch.equal(tensor, weight.to(tensor.dtype)), name
