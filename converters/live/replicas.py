"""Check that ranks with copies of a parameter hold the same values."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch.distributed as dist
import xxhash

from mcore_qwen3vl.converters.live.sharded import hf_parts, unwrap
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.errors import BadInput

SHOWN = 3
"""The most tensors that an error names."""


def check_replicas(models: Any) -> None:
    """Compare the bits of all copies of every parameter; a collective of all ranks.

    Args:
        models: the model, or its virtual pipeline chunks.

    Raises:
        BadInput: copies differ; the message gives the number of such tensors and the first names.
            Raised on every rank.
    """
    own = {
        (part.name, str(part.box)): xxhash.xxh3_128_hexdigest(as_bytes(part.local.cpu()))
        for part in hf_parts(unwrap(models))
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    found: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for held in ranks:
        for place, checksum in held.items():
            found[place].add(checksum)
    differing = list(dict.fromkeys(name for (name, _), sums in found.items() if len(sums) > 1))
    if differing:
        names = ", ".join(differing[:SHOWN]) + (", ..." if len(differing) > SHOWN else "")
        raise BadInput(
            f"The ranks hold different values of {len(differing)} tensors that should be the "
            f"same on all of them ({names}), so there is no one model to write. Load the "
            "checkpoint again, call reduce_gradients before each optimizer step, and give all "
            "ranks the same learning rate."
        )
