"""The operations of a gated delta net equal the plain recurrence and Hugging Face's functions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from mcore_qwen3vl.model.decoder.delta_rule import causal_convolution, gated_delta_rule

BATCH, KEY_HEADS, HEADS, KEY, VALUE, CHANNELS, TAPS = 2, 2, 4, 8, 5, 6, 4
LENGTHS = [1, 7, 64, 65, 150]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}


def inputs(length: int, dtype: torch.dtype, batch: int = BATCH) -> list[Tensor]:
    """Return query, key, value, logarithms of the decay and beta, which have gradients."""
    draw = torch.Generator().manual_seed(length)
    wide = [(KEY_HEADS, KEY), (KEY_HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,)]
    made = [
        torch.randn(batch, length, *width, generator=draw, dtype=torch.float64) for width in wide
    ]
    made[3], made[4] = -F.softplus(2 * made[3]), made[4].sigmoid()
    return [x.to(dtype).requires_grad_() for x in made]


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the definition, token by token."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, dim=2) for x in (q, k))
    if state is None:
        state = q.new_zeros(len(q), HEADS, KEY, VALUE)
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        change = b[:, t, :, None] * (v[:, t] - read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * KEY**-0.5)
    return torch.stack(outputs, 1), state


def with_gradients(
    function: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor]
) -> list[Tensor]:
    """Return the results, and the gradients of a random function of them."""
    results = function(*given)
    draw = torch.Generator().manual_seed(1)
    loss = sum(
        (x * torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype)).sum()
        for x in results
    )
    return [*(x.detach() for x in results), *torch.autograd.grad(loss, given)]


def assert_near(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for ours, right in zip(actual, expected, strict=True):
        assert (ours - right).abs().max() <= tolerance * right.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_delta_rule_equals_the_recurrence(length: int, dtype: torch.dtype) -> None:
    given = inputs(length, dtype)
    ours = with_gradients(lambda *x: gated_delta_rule(*x, bounds=(0, length)), given)
    exact = [x.detach().double().requires_grad_() for x in given]
    assert_near(ours, with_gradients(recurrence, exact), TOLERANCE[dtype])


BOUNDS = (0, 3, 3, 70, 71, 140)  # one sample is empty


def test_packed_samples_are_kept_apart() -> None:
    given = inputs(BOUNDS[-1], torch.float64, batch=1)

    def alone(*x: Tensor) -> tuple[Tensor, Tensor]:
        pairs = pairwise(BOUNDS)
        results = [recurrence(*(y[:, a:b] for y in x)) for a, b in pairs if b > a]
        return torch.cat([output for output, _ in results], 1), results[-1][1]

    ours = with_gradients(lambda *x: gated_delta_rule(*x, bounds=BOUNDS), given)
    assert_near(ours, with_gradients(alone, given), 1e-13)


def test_the_delta_rule_continues_from_a_state() -> None:
    given = inputs(90, torch.float64)
    expected, last = recurrence(*given)
    first, state = gated_delta_rule(*(x[:, :70] for x in given), bounds=(0, 70))
    outputs = [first]
    for t in range(70, 90):
        output, state = gated_delta_rule(
            *(x[:, t : t + 1] for x in given), bounds=(0, 1), state=state
        )
        outputs.append(output)
    assert_near([torch.cat(outputs, 1), state], [expected, last], 1e-13)


def test_half_precision_is_computed_in_float32() -> None:
    given = inputs(100, torch.bfloat16)
    ours, state = gated_delta_rule(*given, bounds=(0, 100))
    exact, _ = recurrence(*(x.double() for x in given))
    assert ours.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert (ours - exact).abs().max() <= 2**-8 * exact.abs().max()  # one rounding


def channels(length: int, dtype: torch.dtype, batch: int = BATCH) -> list[Tensor]:
    draw = torch.Generator().manual_seed(length)
    x = torch.randn(batch, length, CHANNELS, generator=draw, dtype=dtype)
    weight = torch.randn(CHANNELS, TAPS, generator=draw, dtype=dtype)
    return [x.requires_grad_(), weight.requires_grad_()]


def convolved(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (hf.causal_conv1d_fn(x.mT, weight, activation="silu").mT,)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [1, 3, 20])
def test_the_convolution_equals_hugging_face(length: int, dtype: torch.dtype) -> None:
    given = channels(length, dtype)
    ours = with_gradients(lambda *x: (causal_convolution(*x, bounds=(0, length)),), given)
    assert_near(ours, with_gradients(convolved, given), TOLERANCE[dtype])


def test_the_convolution_does_not_cross_samples() -> None:
    given = channels(BOUNDS[-1], torch.float64, batch=1)

    def alone(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        pairs = pairwise(BOUNDS)
        return (torch.cat([convolved(x[:, a:b], weight)[0] for a, b in pairs if b > a], 1),)

    ours = with_gradients(lambda *x: (causal_convolution(*x, bounds=BOUNDS),), given)
    assert_near(ours, with_gradients(alone, given), 1e-13)


def test_the_convolution_continues_after_earlier_inputs() -> None:
    x, weight = channels(9, torch.float64)
    whole = causal_convolution(x, weight, (0, 9))
    for t in range(TAPS - 1, 9):
        earlier = x[:, t - TAPS + 1 : t]
        assert_near(
            [causal_convolution(x[:, t : t + 1], weight, (0, 1), earlier)],
            [whole[:, t : t + 1]],
            1e-13,
        )
