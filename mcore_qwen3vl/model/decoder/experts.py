"""The experts of the torch spec: one product for all experts of a rank, where mcore loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_qwen3vl.model.decoder.grouped import Groups, grouped_product
from mcore_qwen3vl.model.decoder.mlp import weighted_swiglu
from mcore_qwen3vl.model.decoder.stored_experts import Stored, load_each, save_each
from mcore_qwen3vl.model.recompute import remember


class GroupedExperts(nn.Module):
    """Replaces mcore's ``SequentialMLP``, with the same names and shapes in every checkpoint.

    Source: HF ``Qwen3VLMoeTextExperts``; mcore ``TEGroupedMLP``, which needs Transformer Engine.

    Args:
        num_local_experts: E, the number of experts on this rank.
        config: the model's config.
        pg_collection: process groups, of which the expert groups are used.
        name: mcore's name of the module; not used.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        assert inner is not None
        columns, rows = Stored(0, pg_collection), Stored(1, pg_collection)
        self.linear_fc1 = GroupedLinear(
            num_local_experts, (2 * inner, hidden), config, config.init_method, columns
        )
        self.linear_fc2 = GroupedLinear(
            num_local_experts, (hidden, inner), config, config.output_layer_init_method, rows
        )
        self._swiglu = weighted_swiglu(config)
        self.register_state_dict_post_hook(save_each)
        self.register_load_state_dict_pre_hook(load_each)

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
        groups = Groups.of(tokens_per_expert, tokens.device)
        halves, _bias = self.linear_fc1(tokens, groups)  # (T, 2 * inner / etp): gate, then up
        inputs, weights = halves.detach(), probs.detach()
        inner = self._swiglu(halves, probs)
        inner = remember(inner, lambda: self._swiglu(inputs, weights))
        output, _bias = self.linear_fc2(inner, groups)
        return output, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Declare each expert as a box of the tensor of all experts; see :class:`Stored`."""
        return {
            f"{prefix}{name}.{entry}": described
            for name, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2))
            for entry, described in linear.stored.entries(
                f"{prefix}experts.{name}.", linear.weight, tuple(sharded_offsets)
            )
        }


class GroupedLinear(nn.Module):
    """Linear layers of one shape without bias, one for each expert of the rank.

    Args:
        experts: E, the number of experts on this rank.
        shape: (out, in) of one whole expert, before ETP divides it.
        config: the model's config.
        init_method: initialises the weight in place.
        stored: defines how ETP divides the weight, and its form in checkpoints.
    """

    def __init__(
        self,
        experts: int,
        shape: tuple[int, int],
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any] | None,
        stored: Stored,
    ) -> None:
        super().__init__()
        self.stored = stored
        # As mcore's linears: on the GPU, or with CPU initialization on torch's default device.
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        part = (experts, *stored.part(shape))
        self.weight = nn.Parameter(torch.empty(part, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 1 + stored.cut, 1)
        if config.perform_initialization and init_method is not None:
            _initialize(self.weight, init_method, config.use_cpu_initialization)
        # If false, gradients are reduced only over the ranks with the same experts.
        self.weight.allreduce = (  # type: ignore[attr-defined]
            config.expert_model_parallel_size == 1
            and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )

    def forward(self, tokens: Tensor, groups: Groups) -> tuple[Tensor, None]:
        """Apply each expert's matrix to its tokens: (T, in) -> (T, out), and no bias."""
        return grouped_product(tokens, self.weight, groups), None


@torch.no_grad()
def _initialize(weight: Tensor, init_method: Callable[[Tensor], Any], on_host: bool) -> None:
    if on_host:
        init_method(weight)
        return
    with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
        init_method(weight)
