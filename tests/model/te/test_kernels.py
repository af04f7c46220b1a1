"""The reference kernels equal torch's operators and autograd, and Triton's kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.model.te.installed import require

require()

import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.constants import TE_DType  # noqa: E402

from tests.model.te.kernels import attention, gemm, norms, optimizer, pointwise  # noqa: E402

pytestmark = pytest.mark.slow
FLOAT = TE_DType[torch.float32]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def product(a: Tensor, layout: str, b: Tensor, **more: Any) -> tuple[Tensor, Tensor | None]:
    given = {"out": None, "bias": None, "grad": False, "accumulate": False, **more}
    out, bias_gradient, *_ = gemm.generic_gemm(
        a, layout[0] == "T", b, layout[1] == "T", given["out"], None, FLOAT, given["bias"], FLOAT,
        False, None, given["grad"], torch.empty(0), 0, given["accumulate"], False,
    )  # fmt: skip
    return out, bias_gradient


def test_products_are_those_of_a_linear_and_its_backward() -> None:
    x, weight, bias = torch.randn(3, 5, 7), torch.randn(11, 7), torch.randn(11)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = F.linear(x, weight, bias)
    dy = torch.randn_like(y)
    dx, dweight, dbias = torch.autograd.grad(y, leaves, dy)
    x, weight, bias, y = (t.detach() for t in (x, weight, bias, y))
    assert_close(product(weight, "TN", x, bias=bias)[0], y)
    assert_close(product(weight, "NN", dy)[0], dx)
    main_grad = torch.randn(11, 7)
    before = main_grad.clone()
    out, bias_gradient = product(x, "NT", dy, bias=bias, grad=True, out=main_grad, accumulate=True)
    assert out is main_grad
    assert_close(main_grad, before + dweight)
    assert_close(bias_gradient, dbias)


@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_products_lie_one_below_the_other(accumulate: bool) -> None:
    lengths = [4, 0, 3]
    weights = [torch.randn(6, 5) for _ in lengths]
    inputs = [torch.randn(n, 5) for n in lengths]
    out = torch.randn(7, 6)
    expected = torch.cat([F.linear(x, w) for x, w in zip(inputs, weights, strict=True)])
    expected = expected + out if accumulate else expected
    nothing = [torch.empty(0)] * 3
    gemm.te_general_grouped_gemm(
        weights, True, inputs, False, [out], FLOAT, lengths, nothing, FLOAT, True, nothing,
        False, nothing, 0, accumulate, False, 0,
    )  # fmt: skip
    assert_close(out, expected)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_and_their_backward(kind: str, zero_centered: bool) -> None:
    x, gamma, beta, eps = torch.randn(5, 9), torch.randn(9), torch.randn(9), 0.3
    leaves = [t.requires_grad_() for t in ((x, gamma) if kind == "rms" else (x, gamma, beta))]
    weight = gamma + 1 if zero_centered else gamma
    y = (
        F.rms_norm(x, (9,), weight, eps)
        if kind == "rms"
        else F.layer_norm(x, (9,), weight, beta, eps)
    )
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, leaves, dy)
    given = [t.detach() for t in leaves]
    forward = norms.rmsnorm_fwd if kind == "rms" else norms.layernorm_fwd
    out, *stats = forward(*given, eps, None, None, FLOAT, 0, zero_centered)
    assert_close(out, y)
    backward = norms.rmsnorm_bwd if kind == "rms" else norms.layernorm_bwd
    stats = [stat for stat in stats if stat is not None]
    got = backward(dy, given[0], *stats, given[1], 0, zero_centered)
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other)


CAUSAL = tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK
PADDING_CAUSAL = tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK
PADDING = tex.NVTE_Mask_Type.NVTE_PADDING_MASK
BOTTOM_RIGHT = tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK
LAYOUTS = {
    "sbhd": tex.NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD,
    "thd": tex.NVTE_QKV_Layout.NVTE_THD_THD_THD,
}
SCALE = 0.7


def attend(layout: str, mask: Any, cu: Any, padded: Any, q: Any, k: Any, v: Any, dy: Any) -> Any:
    """Return the output, the log-sum-exp and the gradients of q, k and v."""
    cu_q, cu_k = (torch.tensor(one, dtype=torch.int32) for one in cu)
    padded_q, padded_k = (
        None if one is None else torch.tensor(one, dtype=torch.int32) for one in padded
    )
    common = (
        tex.NVTE_Bias_Type.NVTE_NO_BIAS, mask, tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
        (-1, -1), mask == BOTTOM_RIGHT,
    )  # fmt: skip
    bounds = (padded_q, padded_k)
    out, *context = attention.fused_attn_fwd(
        99, 99, True, SCALE, 0.0, True, LAYOUTS[layout], None, None, *common, cu_q, cu_k, q, k, v,
        torch.float32, *bounds, None, None, None, None, None, None, None, 0, False, False,
    )  # fmt: skip
    grads = attention.fused_attn_bwd(
        99, 99, SCALE, 0.0, True, LAYOUTS[layout], None, None, None, None, None, *common, True,
        cu_q, cu_k, q, k, v, out, dy, torch.float32, context, *bounds, None, None, None, False,
    )  # fmt: skip
    return out, context[0], grads[:3]


def expected_of_one(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, visible: Tensor) -> Any:
    """Compute the same for one sample by autograd in float64."""
    q, k, v = leaves = [x.double().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * SCALE
    scores = scores.masked_fill(~visible, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    grads = torch.autograd.grad(out, leaves, dy.double())
    return [x.detach().float() for x in (out, scores.logsumexp(-1), *grads)]


def test_causal_attention_of_a_batch() -> None:
    q, dy = torch.randn(2, 7, 3, 6, 4)  # sbhd
    k, v = torch.randn(2, 7, 3, 2, 4)
    cu = [0, 7, 14, 21]
    out, lse, grads = attend("sbhd", CAUSAL, (cu, cu), (None, None), q, k, v, dy)
    assert lse.shape == (3, 6, 99, 1)
    for b in range(3):
        visible = torch.ones(7, 7).tril().bool()
        expected = expected_of_one(q[:, b], k[:, b], v[:, b], dy[:, b], visible)
        got = (out[:, b], lse[b, :, :7, 0], *(grad[:, b] for grad in grads))
        for one, other in zip(got, expected, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("mask", [PADDING_CAUSAL, PADDING, BOTTOM_RIGHT], ids=lambda m: m.name)
def test_packed_attention_with_padding_between_samples(mask: Any) -> None:
    lengths_q, lengths_k, starts_q, starts_k = (3, 5), (4, 6), (0, 4), (0, 6)
    q, dy = torch.randn(2, 10, 6, 4)
    k, v = torch.randn(2, 13, 2, 4)
    cu = ([0, 3, 8], [0, 4, 10])
    out, lse, grads = attend("thd", mask, cu, ([0, 4, 10], [0, 6, 13]), q, k, v, dy)
    seen_q, seen_k = torch.zeros(10).bool(), torch.zeros(13).bool()
    for n, m, i, j in zip(lengths_q, lengths_k, starts_q, starts_k, strict=True):
        rows, keys = slice(i, i + n), slice(j, j + m)
        seen_q[rows], seen_k[keys] = True, True
        visible = torch.ones(n, m).bool()
        if mask != PADDING:
            visible = visible.tril(m - n if mask == BOTTOM_RIGHT else 0)
        expected = expected_of_one(q[rows], k[keys], v[keys], dy[rows], visible)
        got = (out[rows], lse[rows, :, 0].T, grads[0][rows], grads[1][keys], grads[2][keys])
        for one, other in zip(got, expected, strict=True):
            assert_close(one, other)
    assert not out[~seen_q].any()
    assert not grads[0][~seen_q].any()
    assert not grads[1][~seen_k].any()


def test_swiglu_and_rotary_and_their_backward() -> None:
    halves = torch.randn(3, 5, 14).requires_grad_()
    gate, up = halves.chunk(2, -1)
    expected = F.silu(gate) * up
    grad = torch.randn_like(expected)
    assert_close(pointwise.swiglu(halves.detach(), None), expected)
    (of_halves,) = torch.autograd.grad(expected, halves, grad)
    assert_close(pointwise.dswiglu(grad, halves.detach(), None), of_halves)

    x, angles = torch.randn(5, 2, 3, 8).requires_grad_(), torch.randn(5, 1, 1, 8)
    pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous())
    half = angles[..., :4]
    angles = torch.cat((half, half), -1)
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(half), half))
    turned = torch.cat(turned.unbind(-1), -1)
    plain = (None, tex.NVTE_QKV_Format.NVTE_SBHD, False, None, 1, 0)
    assert_close(pointwise.fused_rope_forward(x.detach(), angles, *plain), turned)
    grad = torch.randn_like(turned)
    (of_x,) = torch.autograd.grad(turned, x, grad)
    assert_close(pointwise.fused_rope_backward(grad, angles, *plain), of_x)


def test_adam_and_the_norm_are_torchs() -> None:
    own, other = ([torch.nn.Parameter(torch.randn(n)) for n in (3, 5)] for _ in range(2))
    for a, b in zip(own, other, strict=True):
        b.data.copy_(a.data)
    adam = torch.optim.AdamW(other, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    first, second = ([torch.zeros_like(p.data) for p in own] for _ in range(2))
    for step in (1, 2):
        gradients = [torch.randn_like(p.data) for p in own]
        norm, each = optimizer.multi_tensor_l2norm(0, None, [gradients], True)
        assert_close(norm[0], torch.nn.utils.get_total_norm(gradients))
        assert_close(each, torch.stack([g.norm() for g in gradients]))
        scaled = [torch.empty_like(g) for g in gradients]
        optimizer.multi_tensor_scale(0, None, [gradients, scaled], 0.5)
        for p, g in zip(other, scaled, strict=True):
            p.grad = g
        adam.step()
        optimizer.multi_tensor_adam(
            0, None, [scaled, [p.data for p in own], first, second],
            0.1, 0.8, 0.9, 1e-3, step, 1, 1, 0.2,
        )  # fmt: skip
        for a, b in zip(own, other, strict=True):
            assert_close(a.data, b.data)


@pytest.mark.skipif(
    tuple(map(int, version("triton").split(".")[:2])) < (3, 7),
    reason="Triton's interpreter does not take this numpy before 3.7",
)
def test_permutations_are_those_of_transformer_engines_triton_kernels() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.model.te.interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    differences = json.loads(ran.stdout.splitlines()[-1])
    assert len(differences) == 6
    assert max(differences.values()) < 5e-6, differences
