"""Megatron's process groups and random states, for one layout."""

from __future__ import annotations

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout


def initialize(layout: Layout, *, seed: int = 1234) -> None:
    """Set up Megatron's process groups and random states for this rank.

    ``torch.distributed`` must be initialised with ``layout.world_size`` ranks.

    Raises:
        BadInput: the number of ranks is not ``layout.world_size``.
    """
    # Imported here, because megatron must not be imported before the CPU backend is installed.
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if dist.get_world_size() != layout.world_size:
        raise BadInput(
            f"Layout {layout} needs {layout.world_size} ranks; {dist.get_world_size()} are running."
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
