"""Broadcast of the first pipeline stage's batches to later stages, which have no vision tower.

Only the first stage runs data workers. A later stage that read for itself would decode images it
does not need, and a file that only it cannot read would put its stream out of step with the others.
"""

from __future__ import annotations

import pickle
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StageFeed:
    """Messages from the first rank of a group to all others, sent without blocking the first.

    A thread sends them: a blocking send would wait for stages that wait for its activations.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        """
        Args:
            group: a gloo group of one rank of each pipeline stage, in order; only feeds use it.
            tag: distinguishes several feeds over one group.
        """
        self._group = group
        self._tag = tag
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self._sender: Thread | None = None

    @property
    def is_source(self) -> bool:
        """Whether this rank is on the first stage."""
        return self._group.rank() == 0

    def send(self, message: Any) -> None:
        """Queue a picklable message for every later stage."""
        if self._sender is None:
            self._sender = Thread(target=self._deliver, name="stage feed", daemon=True)
            self._sender.start()
        self._queue.put(pickle.dumps(message))

    def receive(self) -> Any:
        """Return the first stage's next message."""
        size = torch.empty(1, dtype=torch.int64)
        self._transfer(dist.recv, size, 0)
        payload = torch.empty(int(size), dtype=torch.uint8)
        self._transfer(dist.recv, payload, 0)
        return pickle.loads(payload.numpy().tobytes())  # from a rank of this run

    def _deliver(self) -> None:
        while True:
            payload = torch.frombuffer(bytearray(self._queue.get()), dtype=torch.uint8)
            for stage in range(1, self._group.size()):
                self._transfer(dist.send, torch.tensor([len(payload)]), stage)
                self._transfer(dist.send, payload, stage)

    def _transfer(self, function: Any, tensor: Tensor, stage: int) -> None:
        peer = dist.get_global_rank(self._group, stage)
        function(tensor, peer, group=self._group, tag=self._tag)
