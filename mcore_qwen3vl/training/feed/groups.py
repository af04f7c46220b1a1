"""Which ranks read, and the groups over which batches reach the others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from mcore_qwen3vl.data.loading.measured import PATIENCE


def reads() -> bool:
    """Whether this is the first rank of a first stage."""
    return _is_first_of_stage() and parallel_state.get_pipeline_model_parallel_rank() == 0


def _is_first_of_stage() -> bool:
    """Whether this rank is the first of its TP x CP group."""
    return bool(parallel_state.get_tensor_and_context_parallel_rank() == 0)


def host_group() -> dist.ProcessGroup:
    """This rank's TP x CP group, over gloo: one of its own, which a thread may use."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    mine = _over_gloo(dist.get_process_group_ranks(group))
    assert mine is not None
    return mine


def stages_group() -> dist.ProcessGroup | None:
    """This rank's pipeline group over gloo if it is the first of its stage and there are several.

    A group of its own even where that one is on gloo: its messages must not meet activations.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return None
    return _over_gloo(dist.get_process_group_ranks(group) if _is_first_of_stage() else [])


def wait_for_measuring() -> None:
    """Wait for the ranks that read, which may first measure all data: longer than others wait."""
    dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE)))


def _over_gloo(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A new group of these ranks; every rank of the run calls, those of none with no ranks."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tuple(ranks))
    mine, _ = dist.new_subgroups_by_enumeration(
        [list(members) for members in sorted(set(everywhere)) if members], backend="gloo"
    )
    return mine
