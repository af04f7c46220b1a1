"""What the parity matrix does not show of gated delta nets: host syncs, padding, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import transformer_config as model_config
from mcore_qwen3vl.model.decoder import delta_net
from mcore_qwen3vl.model.decoder.attention import PackedSequence
from mcore_qwen3vl.model.decoder.delta_rule import CHUNK, causal_convolution, gated_delta_rule
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

HYBRID = Architecture.from_hf(tiny_config(family="qwen3.5"))
LENGTH = 24
PACKING = PackedSeqParams(
    qkv_format="thd", cu_seqlens_q=torch.tensor([0, 7, 7, 20, LENGTH], dtype=torch.int32)
)


def on_one_rank(function: Callable[[Any], Tensor]) -> Tensor:
    """Return what `function` gives for a gated delta net with random weights."""

    def on_rank() -> Tensor:
        initialize(Layout())
        model = Qwen3VLModel.from_hf_config(HYBRID, params_dtype=torch.float32)
        return function(model.decoder.layers[0].self_attention)

    [result] = run_layout(on_rank, 1)
    return result


def hidden(batch: int) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(LENGTH, batch, HYBRID.hidden_size, generator=draw)


def test_no_value_is_read_on_the_host() -> None:
    """A tensor on the meta device has none: ``.item()``, ``.tolist()`` and comparisons fail."""

    def shapes(net: Any) -> Tensor:
        net.to("meta")
        packed, _ = net(hidden(1).to("meta"), packed_seq_params=PACKING)
        mask = torch.ones(2, LENGTH, dtype=torch.bool, device="meta")
        padded, _ = net(hidden(2).to("meta"), mask)
        padded.sum().backward()
        return torch.tensor([*packed.shape, *padded.shape])

    width = HYBRID.hidden_size
    assert on_one_rank(shapes).tolist() == [LENGTH, 1, width, LENGTH, 2, width]


def test_padding_on_the_left_changes_nothing() -> None:
    def differences(net: Any) -> Tensor:
        alone, _ = net(hidden(1)[5:])
        mask = torch.arange(LENGTH)[None] >= 5
        padded, _ = net(hidden(1), mask)
        unmasked, _ = net(hidden(1))
        return torch.stack(
            [(x[5:] - alone).abs().max() / alone.abs().max() for x in (padded, unmasked)]
        )

    padded, unmasked = on_one_rank(differences).tolist()
    assert padded < 1e-5
    assert unmasked > 1e-2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"fp8": "hybrid", "tensor_model_parallel_size": 2},
            "multiple of 16 rows .* TP 2 leaves 232 of 464: use a smaller TP or bf16",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]},
            "recomputed in any case",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        transformer_config(HYBRID, spec="te", **overrides)


def test_chunks_of_packed_samples_are_listed_once_for_all_layers() -> None:
    """As in flash-linear-attention's ``prepare_chunk_indices``, which would wait for a copy."""
    bounds = torch.tensor([0, 70, 70, 200, 256], dtype=torch.int32)
    packed = PackedSequence.from_params(
        PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds), torch.device("cpu")
    )
    chunks = delta_net._packing_arguments(packed)["chunk_indices"]
    assert chunks.tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [3, 0]]
    assert chunks.dtype == packed.cu_seqlens_q.dtype
    assert delta_net._packing_arguments(packed)["chunk_indices"] is chunks


def test_a_gpu_needs_kernels_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model_config, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"flash-linear-attention.*install mcore-qwen3vl\[fla\]"):
        transformer_config(HYBRID, params_dtype=torch.bfloat16)
    transformer_config(HYBRID, params_dtype=torch.float32)
    transformer_config(HYBRID, params_dtype=torch.bfloat16, deterministic_mode=True)


@pytest.mark.parametrize(
    ("version", "capability", "overrides", "refused"),
    [
        ((9, 14, 0), 9, {}, True),
        ((9, 14, 0), 9, {"attention_backend": AttnBackend.fused}, True),
        ((9, 14, 0), 9, {"attention_backend": AttnBackend.flash}, False),
        ((9, 14, 0), 9, {"params_dtype": torch.float32}, False),
        ((9, 14, 0), 10, {}, False),
        ((9, 18, 0), 9, {}, False),
    ],
)
def test_a_cudnn_with_wrong_gradients_of_wide_heads_is_refused(
    version: tuple[int, ...],
    capability: int,
    overrides: dict[str, Any],
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utils = ModuleType("transformer_engine.pytorch.utils")
    monkeypatch.setattr(utils, "get_cudnn_version", lambda: version, raising=False)
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(model_config, "find_spec", lambda name: True)
    monkeypatch.setattr(model_config, "HAVE_TE", True)
    expected = pytest.raises(BadInput, match=r"cuDNN 9\.14\.0.* heads of 64.* 9\.18\.0")
    fields = {"params_dtype": torch.bfloat16, **overrides}
    transformer_config(HYBRID, spec="te", **fields)  # its heads are narrow
    monkeypatch.setattr(model_config, "WIDEST_HEAD_OF_OLD_CUDNN", HYBRID.head_dim - 1)
    with expected if refused else nullcontext():
        transformer_config(HYBRID, spec="te", **fields)
    monkeypatch.setattr(model_config, "HAVE_TE", False)
    transformer_config(HYBRID, spec="te", **fields)  # the model says what is missing


def test_the_kernels_get_and_give_what_plain_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the signatures of flash-linear-attention 0.6 compute in plain torch."""

    def causal_conv1d(
        x: Tensor, weight: Tensor, *, activation: str, cu_seqlens: Any = None, **rest: Any
    ) -> tuple[Tensor, None]:
        assert activation == "silu"
        assert x.is_contiguous()
        return causal_convolution(x, weight, bounds_of(x, cu_seqlens, **rest)), None

    def rule(
        q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        assert rest.pop("use_qk_l2norm_in_kernel")
        state, keeps = rest.pop("initial_state"), rest.pop("output_final_state")
        bounds = bounds_of(q, rest.pop("cu_seqlens", None), **rest)
        output, last = gated_delta_rule(q, k, v, g, beta, bounds, state)
        return output, last if keeps else None

    def bounds_of(x: Tensor, cu_seqlens: Any, chunk_indices: Any = None) -> tuple[int, ...]:
        if cu_seqlens is None:
            return 0, x.shape[1]
        samples = chunk_indices[:, 0].bincount(minlength=len(cu_seqlens) - 1)
        assert samples.tolist() == [-(-length // CHUNK) for length in cu_seqlens.diff().tolist()]
        return tuple(cu_seqlens.tolist())

    called: list[str] = []
    kernels = {
        "fla.modules.causal_conv1d": {"causal_conv1d": causal_conv1d},
        "fla.ops.gated_delta_rule": {
            name: lambda *args, name=name, **kw: called.append(name) or rule(*args, **kw)
            for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
        },
    }
    for module, functions in kernels.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**functions))

    draw = torch.Generator().manual_seed(5)
    x = torch.randn(1, LENGTH, 6, generator=draw)
    weight, earlier = torch.randn(6, 4, generator=draw), torch.randn(1, 3, 6, generator=draw)
    packed = PackedSequence.from_params(PACKING, torch.device("cpu"))
    convolve, apply_rule = delta_net._KERNELS
    for samples, bounds, before in ((packed, packed.bounds, None), (None, (0, LENGTH), earlier)):
        expected = causal_convolution(x, weight, bounds, before)
        torch.testing.assert_close(convolve(x, weight, samples, before), expected)

    query, key = (torch.randn(1, LENGTH, 2, 5, generator=draw) for _ in range(2))
    value, beta = torch.randn(1, LENGTH, 4, 3, generator=draw), torch.rand(1, LENGTH, 4)
    inputs = (query, key, value, -torch.rand(1, LENGTH, 4, generator=draw), beta)
    state = torch.randn(1, 4, 5, 3, generator=draw)
    with torch.no_grad():
        output, last = apply_rule(*inputs, packed, None)
        torch.testing.assert_close(output, gated_delta_rule(*inputs, packed.bounds)[0])
        assert last is None  # nobody continues packed samples
        for length in (LENGTH, 1):
            first = [part[:, :length] for part in inputs]
            for got, right in zip(
                apply_rule(*first, None, state),
                gated_delta_rule(*first, (0, length), state),
                strict=True,
            ):
                torch.testing.assert_close(got, right)
    assert called == [*["chunk_gated_delta_rule"] * 2, "fused_recurrent_gated_delta_rule"]
