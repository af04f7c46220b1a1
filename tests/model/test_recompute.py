"""Decoder layers that recompute cheap tensors give the same bits in less memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer import transformer_block
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import recompute
from mcore_qwen3vl.model.decoder.mlp import GatedMLP
from mcore_qwen3vl.model.decoder.norm import RMSNorm
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.model.recompute import recomputing, remember, remember_outputs_of
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config
from tests.model.engine import TOLERANCE, Case, References, build, train_step, wrap
from tests.model.reference import Expected
from tests.model.samples import packed, sample
from tests.turns import slow

IMAGE = [("image", 1, 4, 6)]


def _step(case: Case) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return every gradient of this rank, and how many outputs of each kind the forward kept."""
    (chunk,) = build(case)
    made: list[tuple[str, StorageWeakRef]] = []
    kept: dict[str, int] = {}

    def note(name: str, output: Tensor | tuple[Tensor, ...]) -> None:
        output = output[0] if isinstance(output, tuple) else output  # a norm may return its input
        made.append((name, StorageWeakRef(output.untyped_storage())))

    def count(*_: Any) -> None:
        # One of gloo's threads frees what it has sent only after the collective has returned.
        deadline = time.monotonic() + (0 if case.overrides.get("keep_activations") else 10)
        while time.monotonic() < deadline and not all(s.expired() for _, s in made):
            time.sleep(0.001)
        gc.collect()  # Triton's interpreter of our kernels leaves cycles that hold their tensors
        for name, storage in made:
            kept[name] = kept.get(name, 0) + (not storage.expired())
        made.clear()

    for module in chunk.decoder.layers.modules():
        if isinstance(module, RMSNorm):
            name = "norm of heads" if len(module.weight) == chunk.architecture.head_dim else "norm"
            # A norm that is called for its weights alone has no input.
            module.register_forward_hook(
                lambda m, i, out, name=name: note(name, out) if i else None
            )
        if isinstance(module, GatedMLP):
            module.linear_fc2.register_forward_pre_hook(lambda m, i: note("SwiGLU", i[0]))
    for layer in chunk.decoder.layers:
        layer.self_attention.core_attention.register_forward_pre_hook(
            lambda m, inputs: [note("rotary", x) for x in inputs[:2]] and None
        )
    chunk.output_layer.register_forward_pre_hook(count)
    train_step(case, wrap([chunk]))
    return {name: p.main_grad.clone() for name, p in chunk.named_parameters()}, kept


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("single", torch.bfloat16),
        ("tp2+sp", torch.float32),
        *slow(("single", torch.float32), ("tp2+sp", torch.bfloat16)),
    ],
)
def test_the_same_bits_out_of_less_memory(
    reference: References, layout: str, dtype: torch.dtype
) -> None:
    hf = reference()
    a = hf.architecture
    batch = packed(a, [sample(a, 24, IMAGE), sample(a, 16)], 4)
    expected = Expected([], 40.0, 0.0, {})
    lean = Case(Layout.parse(layout), hf, [[batch]], expected, overrides={"params_dtype": dtype})
    whole = replace(lean, overrides={**lean.overrides, "keep_activations": True})
    for (gradients, less), (same, kept) in zip(
        run_layout(_step, lean.layout.world_size, lean, timeout=60),
        run_layout(_step, lean.layout.world_size, whole, timeout=60),
        strict=True,
    ):
        assert all(torch.equal(gradients[name], same[name]) for name in gradients)
        assert gradients.keys() == same.keys()
        assert all(kept[name] for name in ("norm", "SwiGLU", "rotary"))
        assert less == dict.fromkeys(kept, 0)


class _Offloading(saved_tensors_hooks):
    """A stand-in for Transformer Engine's offloading context."""

    inside_context = False  # read for weights, to know whether they stay on the GPU


def _offloaded_step(case: Case) -> tuple[dict[str, Tensor], int]:
    """Return every gradient, and how many tensors Megatron's offloading took.

    Here it takes tensors of the CPU and keeps copies, where it would send them to the host.
    """
    taken: list[Tensor] = []

    def copied(tensor: Tensor) -> Tensor:
        taken.append(tensor)
        return tensor.clone()

    handler = offloading.ChunkOffloadHandler
    is_activation = staticmethod(lambda tensor: not isinstance(tensor, nn.Parameter))
    context = _Offloading(copied, lambda kept: kept)
    with (
        mock.patch.object(handler, "_can_manage_tensor_for_offload", is_activation),
        mock.patch.object(
            handler, "offload", lambda self, tensor, **_: (None, copied(tensor), False, None)
        ),
        mock.patch.object(handler, "reload", lambda self, state: state[1]),
        mock.patch.object(transformer_engine, "cpu_offload", SimpleNamespace()),
        mock.patch.object(
            transformer_block, "get_cpu_offload_context", return_value=(context, None)
        ),
        mock.patch.object(Tensor, "record_stream", return_value=None),
    ):
        (chunk,) = build(case)
        train_step(case, wrap([chunk]))
    return {name: p.main_grad.clone() for name, p in chunk.named_parameters()}, len(taken)


@pytest.mark.parametrize(
    "flags",
    [
        {"cpu_offloading": True, "cpu_offloading_num_layers": 2},
        {
            "fine_grained_activation_offloading": True,
            "offload_modules": ["attn_norm", "core_attn", "attn_proj", "mlp_norm"],
            "min_offloaded_tensor_size": 1,
        },
    ],
    ids=["of layers", "fine-grained"],
)
def test_offloading_takes_what_is_kept(reference: References, flags: dict[str, Any]) -> None:
    """Nested saved-tensor hooks show a tensor to the innermost alone, so ours must pass it on."""
    hf = reference()
    a = hf.architecture
    batch = packed(a, [sample(a, 24, IMAGE), sample(a, 16)], 4)
    plain = Case(Layout(), hf, [[batch]], Expected([], 40.0, 0.0, {}))
    ((expected, _),) = run_layout(_step, 1, plain)
    ((gradients, taken),) = run_layout(_offloaded_step, 1, replace(plain, overrides=flags))
    assert taken >= 4 * len(a.moe_layers)  # at least four tensors a layer
    for name, of_all in expected.items():  # copies have other strides, so sums are reordered
        assert (gradients[name] - of_all).abs().max() <= TOLERANCE * of_all.abs().max(), name


def test_what_is_kept_by_several_is_made_for_each() -> None:
    norm, x = nn.LayerNorm(6), torch.randn(4, 6, requires_grad=True)
    remember_outputs_of(norm)
    with recomputing():
        y = norm(x)
        z = (y * y).sum() + y[:, 1:3].exp().sum() + (y.t() @ y).sum()
    (gradient,) = torch.autograd.grad(z, x)
    plain = nn.functional.layer_norm(x, (6,))
    expected = (plain * plain).sum() + plain[:, 1:3].exp().sum() + (plain.t() @ plain).sum()
    assert torch.equal(gradient, torch.autograd.grad(expected, x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_around_zero_is_hugging_faces_and_keeps_no_wider_copy_of_its_input(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rounds as Hugging Face's; its bits are those of a norm that keeps the copy."""
    wide: list[StorageWeakRef] = []
    plain = functional.rms_norm

    def rms_norm(x: Tensor, *arguments: Any) -> Tensor:
        wide.append(StorageWeakRef(x.untyped_storage()))
        return plain(x, *arguments)

    monkeypatch.setattr(functional, "rms_norm", rms_norm)
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=True, params_dtype=dtype, sequence_parallel=False
    )
    norm, theirs = RMSNorm(config, 64, eps=1e-2), Qwen3_5RMSNorm(64, eps=1e-2).to(dtype)  # type: ignore[arg-type]
    assert not norm.weight.any()
    draw = torch.Generator().manual_seed(1)
    weight, inputs, gradient = (torch.randn(n, 64, generator=draw).to(dtype) for n in (1, 50, 50))
    for module in (norm, theirs):
        module.weight.data.copy_(weight[0])

    def results(module: Any, context: Any) -> tuple[list[Tensor], bool]:
        x = inputs.clone().requires_grad_()
        with context:
            output = module(x)
        kept = dtype != torch.float32 and not wide[-1].expired()
        gradients = torch.autograd.grad(output, (x, module.weight), gradient)
        return [output.detach(), *gradients], kept

    same, kept = results(norm, nullcontext())
    assert kept == (dtype == torch.bfloat16)
    less, kept = results(norm, recomputing())
    assert not kept
    expected, _ = results(theirs, nullcontext())
    for ours, whole, hf in zip(less, same, expected, strict=True):
        assert torch.equal(ours, whole)
        torch.testing.assert_close(ours, hf)
    exact = {"rtol": 1e-6 if dtype == torch.float32 else 0, "atol": 0}
    torch.testing.assert_close(less[0], expected[0], **exact)


class _Storages(TorchDispatchMode):
    """Notes the storages of all tensors that are made inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def kept(self, *outside: Tensor) -> int:
        """Return the bytes that are still alive, without those of the tensors `outside`."""
        gc.collect()
        known = {tensor.untyped_storage()._cdata for tensor in outside}
        made = self.made.items()
        return sum(size for key, (ref, size) in made if key not in known and not ref.expired())


def _gates(dtype: torch.dtype) -> list[tuple[str, int, int, bool]]:
    """Apply the gates of a gated delta net and of attention, ours and Megatron's.

    Returns:
        Of each, the bytes that ours and Megatron's keep beside inputs and output, and whether
        output and gradients are the same.
    """
    initialize(Layout())
    a = Architecture.from_hf(tiny_config(family="qwen3.5"))
    model = Qwen3VLModel.from_hf_config(a, params_dtype=dtype)
    net, attention = (model.decoder.layers[n].self_attention for n in (0, 3))
    draw = torch.Generator().manual_seed(1)
    weight = net.out_norm.weight
    weight.data.normal_(generator=draw)

    def megatrons_norm(output: Tensor, gate: Tensor) -> Tensor:
        normed = GatedDeltaNet._apply_gated_norm(net, output, gate.view(-1, output.shape[-1]))
        return normed.view(gate.shape).transpose(0, 1).contiguous()

    def megatrons_gate(x: Tensor, gate: Tensor) -> Tensor:
        return SelfAttention._apply_output_gate(attention, x, gate)

    heads, width = net.num_value_heads, net.value_head_dim
    of_net = (2, 24, heads, width), (2, 24, heads * width)
    query = a.num_attention_heads, a.head_dim
    of_attention = (24, 2, query[0] * query[1]), (24, 2, *query)

    def apply(gate: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[int, list[Tensor]]:
        with recomputing(), _Storages() as storages:
            output = gate(*inputs)
        kept = storages.kept(output, *inputs)
        leaves = [x for x in (*inputs, weight) if x.requires_grad]
        gradient = torch.linspace(-1, 1, output.numel(), dtype=dtype).view(output.shape)
        gradients = torch.autograd.grad(output, leaves, gradient, allow_unused=True)
        return kept, [x for x in (output, *gradients) if x is not None]

    found = []
    for name, ours, theirs, shapes, trained in (
        ("norm", net._gated_norm, megatrons_norm, of_net, True),
        ("norm, frozen", net._gated_norm, megatrons_norm, of_net, False),
        ("gate", attention._apply_output_gate, megatrons_gate, of_attention, True),
    ):
        weight.requires_grad_(trained)
        inputs = [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in shapes]
        (kept, tensors), (more, expected) = (apply(gate, inputs) for gate in (ours, theirs))
        assert len(tensors) == len(expected)
        found.append((name, kept, more, all(map(torch.equal, tensors, expected))))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_keep_their_inputs_alone(dtype: torch.dtype) -> None:
    """Megatron's, which are the same bits, keep float32 tensors as well unless compiled."""
    [gates] = run_layout(_gates, 1, dtype)
    for name, kept, more, equal in gates:
        assert equal, name
        assert kept == 0, name
        assert more > 0, name


@pytest.mark.parametrize("emptied", [False, True])
def test_a_tensor_at_the_address_of_one_that_is_gone_is_its_own(emptied: bool) -> None:
    """The allocator may reuse the same memory within a layer.

    Transformer Engine empties the input of a frozen weight.
    """
    x = torch.randn(64, 64, requires_grad=True)
    with recomputing():
        for _ in range(8):
            output = remember(x.detach() * 3, lambda: torch.zeros(64, 64))
            if emptied:
                output.data = torch.empty(0)
            del output
            y = x * 2
            z = (y * y).sum()  # keeps y, which is not remembered
            (gradient,) = torch.autograd.grad(z, x)
            assert torch.equal(gradient, 8 * x.detach())


def test_an_empty_output_is_taken_for_no_other() -> None:
    """All empty tensors have address 0, for example on an expert rank that received no token."""
    weight, rows = torch.randn(3, 4, requires_grad=True), torch.empty(0, dtype=torch.int64)
    with recomputing():
        remember(torch.empty(0, 4), lambda: torch.empty(0, 4))
        chosen = weight.index_select(0, rows)  # keeps the rows
    (gradient,) = torch.autograd.grad(chosen.sum(), weight)
    assert torch.equal(gradient, torch.zeros(3, 4))


def test_nothing_is_remembered_outside_or_without_gradients() -> None:
    y = torch.ones(3)
    assert recompute.recipe_of(remember(y, lambda: y)) is None
    with torch.no_grad(), recomputing():
        assert recompute.recipe_of(remember(y, lambda: y)) is None
