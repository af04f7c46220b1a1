"""The order in which the ranks of a pipeline work, by Megatron's schedules.

It is that of mcore's ``forward_backward_pipelining_without_interleaving`` (1F1B) and
``..._with_interleaving`` (Narayanan et al., arXiv:2104.04473).
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch through one virtual stage of a rank."""

    forward: bool
    micro_batch: int
    chunk: int


def order_of_work(rank: int, ranks: int, chunks: int, micro_batches: int, group: int) -> list[Pass]:
    """Return a rank's work in order: forwards, then forward and backward in turn, then backwards.

    Args:
        chunks: number of virtual stages on each rank.
        group: number of micro-batches that go through a virtual stage before the rank turns to
            its next one.
    """
    table = [
        (micro_batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]
    forwards = [Pass(True, micro_batch, chunk) for micro_batch, chunk in table]
    backwards = [Pass(False, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in table]
    # The forwards of the warm-up, as mcore counts them; one more precedes the first backward.
    ahead = ranks - rank - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * group
    ahead = min(ahead, len(table))
    rest = len(table) - ahead
    steady = chain.from_iterable(zip(forwards[ahead:], backwards[:rest], strict=True))
    return [*forwards[:ahead], *steady, *backwards[rest:]]
