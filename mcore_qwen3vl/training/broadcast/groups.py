"""The ranks that read data, and the groups over which batches reach the others.

Only the first pipeline stage runs data workers, and later stages, which have no vision tower, get
its batches. A later stage that read for itself would decode images it does not need, and a file
that only it cannot read would put its stream out of step with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from mcore_qwen3vl.data.encoding.balanced import PATIENCE


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


def wait_for_measuring() -> None:
    """Wait for the ranks that read, with a long timeout: they may first measure all data."""
    dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE)))


def _over_gloo(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Create a gloo group of `ranks`; all ranks call this, and one with none in it gets None."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tuple(ranks))
    mine, _ = dist.new_subgroups_by_enumeration(
        [list(members) for members in sorted(set(everywhere)) if members], backend="gloo"
    )
    return mine


class StageFeed:
    """Messages from the first stage to all later ones, sent without blocking the first.

    A thread sends them: a blocking send would wait for stages that wait for its activations.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """
        Args:
            group: a gloo group of one rank of each pipeline stage, in order; nothing else uses it.
        """
        self._group = group
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._sender: Thread | None = None

    @classmethod
    def between_stages(cls) -> StageFeed | None:
        """Connect the first ranks of all stages; all ranks call this.

        Even a pipeline group that uses gloo is not reused, because it carries activations, with
        which batches must not mix.

        Returns:
            The feed; None if there is one stage only, or this rank is not the first of its stage.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return None
        mine = _over_gloo(dist.get_process_group_ranks(group) if _is_first_of_stage() else [])
        return cls(mine) if mine else None

    @property
    def is_source(self) -> bool:
        """Whether this rank is on the first stage."""
        return self._group.rank() == 0

    def send(self, message: Any) -> None:
        """Queue a picklable message, which must not change any more, for every later stage."""
        if self._sender is None:
            self._sender = Thread(target=self._deliver, name="stage feed", daemon=True)
            self._sender.start()
        self._queue.put(message)

    def receive(self) -> Any:
        """Return the first stage's next message."""
        message = [None]
        dist.recv_object_list(message, group=self._group, group_src=0)
        return message[0]

    def _deliver(self) -> None:
        while True:
            message = self._queue.get()
            # A broadcast would wait for the last stage first, which asks for its batch only when
            # the stage before it, which waits for this message too, has sent activations.
            for stage in range(1, self._group.size()):
                dist.send_object_list([message], group=self._group, group_dst=stage)
