"""What attaching adapters changes and what not: memory, frozen weights, dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import RouterGatingLinearFunction
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.lora import adapter_freezing, attach, whole_patterns
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import tiny_config

LAYER = "model.language_model.layers.1."
ATTENTION = tuple(f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv")


@dataclass(frozen=True)
class Target:
    r: int = 4
    scaling: float = 0.5


def build(layout: Layout, moe: bool = False, dtype: str = "float32", **text: Any) -> Qwen3VLModel:
    initialize(layout)
    config = tiny_config(moe=moe, dtype=dtype, text=text)
    (chunk,) = build_chunks(Architecture.from_hf(config), layout)
    return chunk


def adapted(
    moe: bool, dropout: float = 0.0, layout: Layout | None = None, dtype: str = "float32"
) -> Qwen3VLModel:
    chunk = build(layout or Layout(), moe, dtype)
    names = [*ATTENTION, "model.visual.blocks.1.attn.proj.weight"]
    names += [f"{LAYER}mlp.experts.gate_up_proj"] if moe else [f"{LAYER}mlp.down_proj.weight"]
    attach(chunk, dict.fromkeys(names, Target()), dropout=dropout)
    choice = adapter_freezing()
    choice.add_trainable(whole_patterns(chunk, ["model.visual.merger.norm.bias"]))
    choice.apply(chunk)
    for parameter in chunk.adapter.parameters():
        nn.init.normal_(parameter, std=0.1)
    return chunk


def inputs(length: int = 8) -> tuple[Tensor, Tensor]:
    ids = torch.arange(length)[None]
    return ids, ids.expand(3, 1, length)


def memory_of_a_frozen_weight(distributed: bool) -> dict[str, int]:
    """Count what bf16 training holds beside the weights, in numbers of values."""
    chunk = adapted(moe=True, dtype="bfloat16")
    model = DistributedDataParallel(
        chunk.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        ),
        Float16Module(chunk.config, chunk),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=0.1, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
        ),
        [model],
    )  # fmt: skip
    for parameter in chunk.parameters():
        if parameter.requires_grad:
            parameter.main_grad.fill_(1.0)
        else:
            assert not hasattr(parameter, "main_grad")
            assert parameter.grad is None
    optimizer.step()
    counts = {"gradients": 0, "copies": 0, "moments": 0}
    for buffer in [*model.buffers, *model.expert_parallel_buffers]:
        counts["gradients"] += buffer.grad_data.numel()
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for copy in group["params"]:
                assert copy.dtype == torch.float32
                counts["copies"] += copy.numel()
                state = part.optimizer.state[copy]
                counts["moments"] += state["exp_avg"].numel() + state["exp_avg_sq"].numel()
    counts["trained"] = sum(p.numel() for p in chunk.parameters() if p.requires_grad)
    counts["all"] = sum(p.numel() for p in chunk.parameters())
    return counts


@pytest.mark.parametrize("distributed", [False, True])
def test_frozen_weights_have_no_gradient_no_copy_and_no_moments(distributed: bool) -> None:
    (counts,) = run_layout(memory_of_a_frozen_weight, 1, distributed)
    assert counts["trained"] * 10 < counts["all"]
    padding = 256  # Megatron may pad each of two buffers by this many values
    assert counts["trained"] <= counts["gradients"] <= counts["trained"] + 2 * padding
    assert counts["copies"] == counts["trained"]
    assert counts["moments"] == 2 * counts["trained"]


def weight_gradients() -> list[str]:
    """Return the calls of mcore's functions that compute weight gradients, in an MoE step."""
    chunk = adapted(moe=True)
    calls = []
    for function in (
        layers.LinearWithGradAccumulationAndAsyncCommunication,
        RouterGatingLinearFunction,
    ):
        original = function.backward

        def counted(
            ctx: Any, *grads: Any, name: str = function.__name__, of: Any = original
        ) -> Any:
            calls.append(name)
            return of(ctx, *grads)

        function.backward = staticmethod(counted)
    chunk(*inputs()).float().square().sum().backward()
    assert all(p.grad is None for p in chunk.parameters() if not p.requires_grad)
    assert all(p.grad is not None for n, p in chunk.adapter.named_parameters() if "visual" not in n)
    return calls


def test_no_gradient_of_a_frozen_weight_is_worked_out() -> None:
    assert run_layout(weight_gradients, 1) == [[]]


def rows_of_factors(layout: Layout) -> dict[str, tuple[int, bool]]:
    """Return, for each B, its number of rows on this rank and whether it trains."""
    chunk = build(layout, num_key_value_heads=2)
    attach(chunk, dict.fromkeys(ATTENTION, Target()))
    adapter_freezing().apply(chunk)
    return {p.name: (len(p.lora_B), p.lora_B.requires_grad) for _, p in chunk.adapter.pairs()}


def test_with_fewer_kv_heads_than_ranks_some_hold_no_row_of_a_key() -> None:
    """Four ranks divide two groups of q q q q k v; every rank has all A factors."""
    d = 24
    q, k, v = ATTENTION
    first, second = (
        {q: (3 * d, True), k: (0, False), v: (0, False)},
        {q: (d, True), k: (d, True), v: (d, True)},
    )
    assert run_layout(rows_of_factors, 4, Layout(tp=4)) == [first, second, first, second]


def refused() -> None:
    chunk = build(Layout())
    with pytest.raises(BadInput, match=r"LoRA on .*q_norm.weight is not supported"):
        attach(chunk, {f"{LAYER}self_attn.q_norm.weight": Target()})
    with pytest.raises(BadInput, match=r"k_proj.weight in one weight with .*q_proj"):
        list(whole_patterns(chunk, [ATTENTION[1]]))
    attach(chunk, {ATTENTION[0]: Target()})
    with pytest.raises(BadInput, match="has an adapter already"):
        attach(chunk, {ATTENTION[0]: Target()})


def test_what_cannot_be_adapted_is_refused() -> None:
    run_layout(refused, 1)


def dropped_outputs(layout: Layout) -> dict[str, Any]:
    chunk = adapted(moe=False, dropout=0.5, layout=layout)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for parameter in chunk.parameters():
        if not parameter.requires_grad:
            torch.manual_seed(0)
            parameter.data.normal_(std=0.1)
    torch.manual_seed(3)
    for parameter in chunk.adapter.parameters():  # the same on every rank
        parameter.data.fill_(0.1)
    torch.manual_seed(4)
    outputs = []
    for training in (True, True, False, False):
        chunk.train(training)
        outputs.append(chunk(*inputs()).detach())
    (site,) = {
        hook.__self__
        for hook in chunk.decoder.layers[1].self_attention.linear_qkv._forward_hooks.values()  # type: ignore[attr-defined]
    }
    x = torch.ones(500, 1, site.pairs[0].places["lora_A"].shape[1])
    chunk.train()
    torch.manual_seed(5)
    parts = site._apply_a(x, [pair.lora_A for pair in site.pairs]).split(4, -1)
    return {"outputs": outputs, "parts": [part.detach() for part in parts]}


def test_dropout_is_of_each_factor_and_of_training_alone() -> None:
    (found,) = run_layout(dropped_outputs, 1, Layout())
    once, again, still, same = found["outputs"]
    assert not torch.equal(once, again)
    assert torch.equal(still, same)
    q, k, v = found["parts"]
    assert not torch.equal(q, k)
    assert not torch.equal(k, v)
    assert q.mean().item() == pytest.approx(48 * 0.1, rel=0.02)  # kept values are scaled up


def test_tp_ranks_drop_the_same_values_of_an_input_that_they_share() -> None:
    first, second = run_layout(dropped_outputs, 2, Layout(tp=2))
    for a, b in zip(first["parts"], second["parts"], strict=True):
        assert torch.equal(a, b)
