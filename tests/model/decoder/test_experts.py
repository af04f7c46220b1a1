"""Our experts, one parameter for all of a rank, equal mcore's, which are a module each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.experts import GroupedExperts, Groups, grouped_product
from mcore_qwen3vl.model.decoder.layer import block_spec
from mcore_qwen3vl.model.decoder.mlp import weighted_swiglu
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

COUNTS = [3, 0, 5, 1]
KERNEL, NO_KERNEL = (12, 20), (10, 14)  # in, out: the kernel needs lines of whole 16 bytes


def one_by_one(rows: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    runs = rows.split(counts)
    return torch.cat([run @ one.T for run, one in zip(runs, matrices, strict=True)])


@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0], [4]], ids=["some", "no rows", "one"])
@pytest.mark.parametrize("shape", [KERNEL, NO_KERNEL], ids=["kernel", "no kernel"])
@pytest.mark.parametrize("on", ["list", "tensor"])
def test_products_and_gradients(counts: list[int], shape: tuple[int, int], on: str) -> None:
    torch.manual_seed(5)
    width, out = shape
    given = [torch.randn(sum(counts), width), torch.randn(len(counts), out, width)]
    ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    groups = Groups.from_counts(counts if on == "list" else torch.tensor(counts), given[0].device)
    result, expected = grouped_product(*ours, groups), one_by_one(*theirs, counts)
    torch.testing.assert_close(result, expected)
    gradient = torch.randn_like(expected)
    result.backward(gradient)
    expected.backward(gradient)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize(
    ("shape", "dtype", "start", "calls"),
    [
        (KERNEL, torch.float32, 0, 1),
        (KERNEL, torch.float32, 1, 0),  # at an odd address
        (NO_KERNEL, torch.float32, 0, 0),
        (KERNEL, torch.bfloat16, 0, 0),  # lines of 24 and 40 bytes
        ((16, 24), torch.bfloat16, 0, 1),
        (KERNEL, torch.float64, 0, 0),
    ],
)
def test_when_the_kernel_is_taken(
    shape: tuple[int, int], dtype: torch.dtype, start: int, calls: int
) -> None:
    rows = torch.randn(9 * shape[0] + start, dtype=dtype)[start:].view(9, -1)
    matrices = torch.randn(4, *shape[::-1], dtype=dtype)
    groups = Groups.from_counts(COUNTS, rows.device)
    with mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm) as kernel:
        result = grouped_product(rows, matrices, groups)
    assert (kernel.call_count, result.dtype) == (calls, dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(result, one_by_one(rows, matrices, COUNTS))


class Unwritten(TorchDispatchMode):
    """Leaves NaN where ``F.grouped_mm`` has no rows to sum over."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._grouped_mm.default and args[0].dim() == args[1].dim() == 2:
            result[args[2].diff(prepend=args[2].new_zeros(1)) == 0] = torch.nan
        return result


@pytest.mark.parametrize("counts", [COUNTS, [3, 1, 4, 1]])
def test_what_the_kernel_leaves_for_no_rows_is_no_gradient(counts: list[int]) -> None:
    """On Blackwell the kernel leaves groups without rows unwritten: pytorch/pytorch#172439."""
    rows, matrices = torch.randn(9, 12), torch.randn(4, 20, 12, requires_grad=True)
    with Unwritten():
        grouped_product(rows, matrices, Groups.from_counts(counts, rows.device)).sum().backward()
    assert matrices.grad is not None
    sums = torch.stack([run.sum(0) for run in rows.split(counts)])
    torch.testing.assert_close(matrices.grad, sums[:, None].expand(-1, 20, -1))


MOE = Architecture.from_hf(tiny_config(moe=True))
OFFSETS = ((0, 2, 5),)  # the third of five layers
LAYOUTS = ["single", "ep2xdp4", "tp2xetp2+sp", "tp2xep2xetp2xdp2+sp"]


def make(layout: Layout, **overrides: Any) -> Any:
    """Build experts as the torch spec does, with random weights."""
    config = transformer_config(MOE, **{**layout.config_overrides(), **overrides})
    layer = block_spec(config, "torch", deepstack_layers=0).layer_specs[0]
    build = layer.submodules.mlp.keywords["submodules"].experts
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build(MOE.num_experts // layout.ep, config, pg_collection=groups)


def both(layout: Layout) -> tuple[GroupedExperts, SequentialMLP]:
    """Build our experts and mcore's with the same weights, copied by ``state_dict()``."""
    ours, theirs = make(layout), make(layout, moe_grouped_gemm=False)
    assert isinstance(ours, GroupedExperts)
    assert isinstance(theirs, SequentialMLP)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def described(entries: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Return what a checkpoint would hold, without local names."""
    return set(map(_facts, _built(entries)))


def _built(entries: dict[str, Any]) -> Iterator[Any]:
    for entry in entries.values():
        yield from entry.build() if isinstance(entry, ShardedTensorFactory) else (entry,)


def _facts(piece: ShardedTensor | ShardedObject) -> tuple[Any, ...]:
    common = (piece.key, piece.global_shape, piece.global_offset, piece.replica_id)
    if isinstance(piece, ShardedObject):
        return (*common, piece.data)
    local = (piece.local_shape, piece.axis_fragmentations, piece.prepend_axis_num, piece.dtype)
    return (*common, *local, tuple(piece.data.flatten().tolist()))


def _checkpoints_agree(layout: Layout) -> int:
    initialize(layout)
    ours, theirs = both(layout)
    old, new = theirs.state_dict(), ours.state_dict()
    assert old.keys() == new.keys()
    assert all(old[k] is new[k] or torch.equal(old[k], new[k]) for k in old)
    metadata = {"dp_cp_group": ProcessGroupCollection.use_mpu_process_groups().dp_cp}
    stored = described(ours.sharded_state_dict("layers.", OFFSETS))
    assert stored == described(theirs.sharded_state_dict("layers.", OFFSETS, metadata))
    return len(stored)


@pytest.mark.parametrize("layout", map(Layout.parse, LAYOUTS), ids=LAYOUTS)
def test_names_and_boxes_in_checkpoints_are_megatrons(layout: Layout) -> None:
    counts = run_layout(_checkpoints_agree, layout.world_size, layout)
    # Each expert has gate, up and down, and an extra state (FP8 scales) for each of two linears.
    assert set(counts) == {(3 + 2) * MOE.num_experts // layout.ep}


def _state_that_lacks_an_expert() -> str:
    initialize(Layout())
    ours = make(Layout())
    state = ours.state_dict()
    del state["local_experts.1.linear_fc2.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*linear_fc2\.weight") as raised:
        ours.load_state_dict(state)
    return str(raised.value)


def test_a_state_that_lacks_an_expert_is_refused() -> None:
    run_layout(_state_that_lacks_an_expert, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weighted_swiglu_rounds_where_megatrons_does(dtype: torch.dtype) -> None:
    """Megatron computes it in the dtype of the router's weights."""
    torch.manual_seed(4)
    halves, weights = torch.randn(7, 2 * 5, dtype=dtype), torch.rand(7)
    gradient = torch.randn(7, 5, dtype=dtype)
    results = []
    for fused in (False, True):
        config = transformer_config(MOE, bias_activation_fusion=fused)
        inputs = halves.clone().requires_grad_(), weights.clone().requires_grad_()
        output = weighted_swiglu(config)(*inputs)
        output.backward(gradient)
        assert output.dtype == dtype
        results.append([output, *(x.grad for x in inputs)])
    close = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {}
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other, **close)
