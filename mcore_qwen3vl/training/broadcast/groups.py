"""The ranks that read data, and the groups over which batches reach the others."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from mcore_qwen3vl.data.loading.measured import PATIENCE


def reads() -> bool:
    """Return whether this is the first rank of a first pipeline stage."""
    return _is_first_of_stage() and parallel_state.get_pipeline_model_parallel_rank() == 0


def _is_first_of_stage() -> bool:
    """Return whether this rank is the first of its TP x CP group."""
    return bool(parallel_state.get_tensor_and_context_parallel_rank() == 0)


def host_group() -> dist.ProcessGroup:
    """Create a gloo group of this rank's TP x CP group, for use by a thread."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    mine = _over_gloo(dist.get_process_group_ranks(group))
    assert mine is not None
    return mine


def stages_group() -> dist.ProcessGroup | None:
    """Create a gloo group of the stages' first ranks, if there are several stages.

    Even a pipeline group that uses gloo is not reused, because it carries activations, with which
    batches must not mix.

    Returns:
        The group; None if there is one stage only, or this rank is not the first of its stage.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return None
    return _over_gloo(dist.get_process_group_ranks(group) if _is_first_of_stage() else [])


def wait_for_measuring() -> None:
    """Wait for the ranks that read, with a long timeout: they may first measure all data."""
    dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE)))


def _over_gloo(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Create a gloo group of `ranks`, which are empty if this rank is in none; all ranks call this.

    Returns:
        The group; None if `ranks` is empty.
    """
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tuple(ranks))
    mine, _ = dist.new_subgroups_by_enumeration(
        [list(members) for members in sorted(set(everywhere)) if members], backend="gloo"
    )
    return mine
