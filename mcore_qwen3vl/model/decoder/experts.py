"""The experts of the torch spec: one kernel for all experts of a rank, where mcore loops.

In checkpoints they have the form of mcore's ``SequentialMLP``. Source: mcore
``SequentialMLP.sharded_state_dict``, ``apply_swiglu_sharded_factory``. At the end is a
function that replaces one of mcore's for DeepEP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor, nn

from mcore_qwen3vl.kernels.permutation import zero_empty
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.decoder.mlp import weighted_swiglu
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.recompute import remember

label_module(__file__, "experts and router")

Offset = tuple[int, int, int]
"""Axis, index on it, and number of indices: mcore's rank offset."""

_WEIGHT, _EXTRA = "weight", "_extra_state"

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GroupedExperts(nn.Module):
    """Replaces mcore's ``SequentialMLP``, with the same names and shapes in every checkpoint.

    The arguments are mcore's; E is `num_local_experts`, the number of experts on this rank. Source:
    HF ``Qwen3VLMoeTextExperts``; mcore ``TEGroupedMLP``, which needs Transformer Engine.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        assert inner is not None
        experts, groups = num_local_experts, pg_collection
        self.linear_fc1 = GroupedLinear(
            experts, (2 * inner, hidden), 0, config, config.init_method, groups
        )
        self.linear_fc2 = GroupedLinear(
            experts, (hidden, inner), 1, config, config.output_layer_init_method, groups
        )
        self._swiglu = weighted_swiglu(config)
        self.register_state_dict_post_hook(_name_each_expert)
        self.register_load_state_dict_pre_hook(_stack_named_experts)

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """Apply each expert to its tokens, with the interface of mcore's experts.

        Args:
            tokens: (T, H), ordered by expert.
            tokens_per_expert: (E,) int64, on the host or the device.
            probs: (T,) router weights.

        Returns:
            (T, H) weighted outputs, and no bias.
        """
        groups = Groups.from_counts(tokens_per_expert, tokens.device)
        halves, _bias = self.linear_fc1(tokens, groups)  # (T, 2 * inner / etp): gate, then up
        inputs, weights = halves.detach(), probs.detach()
        inner = self._swiglu(halves, probs)
        inner = remember(inner, lambda: self._swiglu(inputs, weights))
        output, _bias = self.linear_fc2(inner, groups)
        return output, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Declare each expert as a box of the tensor of all experts."""
        return {
            f"{prefix}{name}.{entry}": described
            for name, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2))
            for entry, described in linear.sharded_entries(
                f"{prefix}experts.{name}.", tuple(sharded_offsets)
            )
        }


class GroupedLinear(nn.Module):
    """Linear layers of one shape without bias, one for each expert of the rank.

    Args:
        shape: (out, in) of one whole expert, before ETP divides it.
        partition_dim: the axis of (out, in) that ETP divides; on axis 0 gate and up are divided
            separately.
    """

    def __init__(
        self,
        experts: int,
        shape: tuple[int, int],
        partition_dim: Literal[0, 1],
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any] | None,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self._partition_dim, self._groups = partition_dim, groups
        part = [experts, *shape]
        part[1 + partition_dim] = divide(part[1 + partition_dim], groups.expt_tp.size())
        # As mcore's linears: on the GPU, or with CPU initialization on torch's default device.
        on_host = config.use_cpu_initialization
        device = None if on_host else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(part, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 1 + partition_dim, 1)
        if config.perform_initialization and init_method is not None:
            tracker = get_expert_parallel_rng_tracker_name()
            states = nullcontext() if on_host else get_cuda_rng_tracker().fork(tracker)
            with torch.no_grad(), states:
                init_method(self.weight)
        # If false, gradients are reduced only over the ranks with the same experts.
        self.weight.allreduce = (  # type: ignore[attr-defined]
            config.expert_model_parallel_size == 1
            and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )

    def forward(self, tokens: Tensor, groups: Groups) -> tuple[Tensor, None]:
        """Apply each expert's matrix to its tokens: (T, in) -> (T, out), and no bias."""
        return grouped_product(tokens, self.weight, groups), None

    def sharded_entries(
        self, key: str, offsets: tuple[Offset, ...]
    ) -> Iterator[tuple[str, ShardedTensorFactory | ShardedObject]]:
        """Yield the entries in ``sharded_state_dict()``, by name below this module.

        The linear's key in the checkpoint ends in a dot; `offsets` are among stacked layers.
        """
        weight, groups = self.weight, self._groups
        local_count, etp, copy = len(weight), groups.expt_tp.rank(), groups.expt_dp.rank()
        first, total = groups.ep.rank() * local_count, groups.ep.size() * local_count
        experts = [(first + local, total) for local in range(local_count)]

        @torch.no_grad()
        def build(key: str, matrices: Tensor, replica: Any, _range: Any) -> list[ShardedTensor]:
            return [
                piece
                for number, matrix in zip(experts, matrices, strict=True)
                for piece in self._boxes_of_expert(
                    key, matrix, (*offsets, (len(offsets), *number)), replica
                )
            ]

        @torch.no_grad()
        def merge(pieces: list[Tensor]) -> Tensor:
            return torch.cat(pieces).view(weight.shape)

        factory = ShardedTensorFactory(
            f"{key}{_WEIGHT}", weight, build, merge, replica_id=(0, 0, copy)
        )
        yield _WEIGHT, factory
        # Entries for FP8's scales, which the te spec expects when it loads.
        for local, number in enumerate(experts):
            places = [(place, count) for _, place, count in offsets] + [number]
            at, shape = zip(*places, strict=True)
            replica = (0, etp, copy)
            yield f"{_EXTRA}{local}", ShardedObject(f"{key}{_EXTRA}", None, shape, at, replica)

    def _boxes_of_expert(
        self, key: str, matrix: Tensor, offsets: tuple[Offset, ...], replica: Any
    ) -> Iterator[ShardedTensor]:
        """Yield the boxes of one expert (out, in)."""
        stacked, etp = len(offsets), self._groups.expt_tp
        parts = matrix.chunk(2) if self._partition_dim == 0 else (matrix,)
        for number, part in enumerate(parts):
            index, count = number * etp.size() + etp.rank(), len(parts) * etp.size()
            place = (stacked + self._partition_dim, index, count)
            yield ShardedTensor.from_rank_offsets(
                key, part, *offsets, place, replica_id=replica, prepend_axis_num=stacked
            )


def _name_each_expert(
    experts: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    """Name each expert as in Megatron's legacy format; a hook of ``state_dict()``."""
    for parameter, _ in experts.named_parameters():
        name = parameter.removesuffix(f".{_WEIGHT}")
        for number, matrix in enumerate(state.pop(f"{prefix}{parameter}")):
            local = f"{prefix}local_experts.{number}.{name}"
            state |= {f"{local}.{_WEIGHT}": matrix, f"{local}.{_EXTRA}": None}


def _stack_named_experts(experts: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept the names of both forms of checkpoint; a hook of ``load_state_dict()``."""
    for parameter, weight in experts.named_parameters():
        name = parameter.removesuffix(f".{_WEIGHT}")
        locals_ = [f"{prefix}local_experts.{number}.{name}" for number in range(len(weight))]
        if all(f"{local}.{_WEIGHT}" in state for local in locals_):
            each = [state.pop(f"{local}.{_WEIGHT}") for local in locals_]
            state[f"{prefix}{parameter}"] = torch.stack(each)
        # Entries of FP8's scales, in either form, have no use here and would be unexpected.
        for number, local in enumerate(locals_):
            state.pop(f"{local}.{_EXTRA}", None)
            state.pop(f"{prefix}{name}.{_EXTRA}{number}", None)


@dataclass(frozen=True)
class Groups:
    """Consecutive runs of rows, one for each of E matrices, in their order."""

    counts: Tensor  # (E,) rows in each run, on the host or the device, where they were counted
    ends: Tensor  # (E,) int32, on the rows' device: the index after each run's last row

    @classmethod
    def from_counts(cls, counts: Tensor | Sequence[int], device: torch.device) -> Groups:
        """Build groups from the numbers of rows on `device`, without a host sync."""
        if not isinstance(counts, Tensor):
            counts = torch.tensor(counts, device="cpu")
        return cls(counts, to_device(counts.cumsum(0, dtype=torch.int32), device))

    @cached_property
    def sizes(self) -> list[int]:
        """`counts` on the host; takes a host sync if they were counted on the device."""
        sizes: list[int] = self.counts.tolist()
        return sizes

    def zero_empty(self, gradients: Tensor) -> Tensor:
        """Zero, in place and without a host sync, the gradients (E, ...) of runs without rows."""
        # On some GPUs the kernel leaves uninitialised memory there: pytorch#172439, #174314.
        if not self.counts.is_cuda and bool(self.counts.all()):
            return gradients
        zero_empty(gradients, to_device(self.counts, gradients.device))
        return gradients


def grouped_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """Multiply each run of rows by its own matrix, transposed as in ``F.linear``.

    Rows (T, in) and matrices (E, out, in) of one dtype give (T, out).
    """
    # Without rows, any matrix gives the empty product, and a gradient of zeros to all of them.
    if len(matrices) == 1 or not len(rows):
        return F.linear(rows, matrices[0])
    if not _has_kernel(rows, matrices):
        runs = rows.split(groups.sizes)
        return torch.cat(
            [F.linear(run, matrix) for run, matrix in zip(runs, matrices, strict=True)]
        )
    if matrices.requires_grad and torch.is_grad_enabled():
        matrices = matrices.view_as(matrices)  # so that the hook is for this product alone
        matrices.register_hook(groups.zero_empty)
    product = F.grouped_mm(rows, matrices.transpose(1, 2), offs=groups.ends)
    if product.requires_grad:
        product.register_hook(Tensor.contiguous)  # the kernels take no expanded gradient
    return product


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Return whether ``F.grouped_mm`` has a kernel for these tensors."""
    # Row sizes and addresses must be multiples of 16 bytes. On a GPU it accepts dtypes other than
    # bf16 too, but multiplies one matrix after another, with a host sync for the counts.
    size = rows.element_size()
    if any(length * size % 16 for length in matrices.shape[1:]):
        return False
    if rows.data_ptr() % 16 or matrices.data_ptr() % 16:
        return False
    return rows.dtype == torch.bfloat16 if rows.is_cuda else rows.dtype in _KERNEL_DTYPES


def indices_to_multihot(self: Any, indices: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Spread DeepEP's lists of chosen experts over this rank's experts without a host sync.

    Megatron selects the valid entries by a mask, for whose number the host waits four times in
    every layer. The arguments and results are those of the method of this name that it replaces.

    Args:
        indices: (T, k) int64 experts of this rank, -1 for those of other ranks.
        probs: (T, k) float32.

    Returns:
        (T, E) bool, whether an expert takes a token, and (T, E) float32, with which weight.
    """
    experts = self.num_local_experts
    columns = indices.where(indices >= 0, experts)  # one more column, for experts of other ranks
    chosen = torch.zeros(len(indices), experts + 1, dtype=torch.bool, device=indices.device)
    weights = torch.zeros(chosen.shape, dtype=probs.dtype, device=probs.device)
    chosen = chosen.scatter_(1, columns, True)[:, :experts]
    return chosen.contiguous(), weights.scatter(1, columns, probs)[:, :experts].contiguous()
