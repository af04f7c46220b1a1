"""The adapters of a pipeline chunk, as a child module, and their form in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from mcore_qwen3vl.model.lora.pair import FactorName, Pair, Place


class Adapter(nn.Module):
    """All pairs of a chunk under their Hugging Face names, as in PEFT's ``base_model.model``.

    A pair is ``model.language_model.layers.3.self_attn.q_proj`` with ``lora_A`` and ``lora_B``.
    Layers are counted over the whole model. An expert's number is the last part of its name.
    """

    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self._groups = groups

    def put(self, pair: Pair) -> None:
        """Add a pair under its name."""
        path = pair.name.removesuffix(".weight").split(".")
        if pair.expert is not None:
            path.append(str(pair.expert[0]))
        parent: nn.Module = self
        for name in path[:-1]:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(path[-1], pair)

    def pairs(self) -> Iterator[tuple[str, Pair]]:
        """Yield every pair of this rank's chunk with its path below the adapter."""
        for path, module in self.named_modules():
            if isinstance(module, Pair):
                yield path, module

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """Declare the place of each factor's part in the whole factor.

        By default mcore would treat a linear's children as replicated: a run on two TP ranks would
        silently save the first rank's factors for both.
        """
        return {
            f"{prefix}{path}.{factor}": self._sharded(pair, factor)
            for path, pair in self.pairs()
            for factor in pair.places
            if getattr(pair, factor).numel()
        }

    def _sharded(self, pair: Pair, factor: FactorName) -> ShardedTensor | ShardedTensorFactory:
        groups, place = self._groups, pair.places[factor]
        tp, copies = (
            (groups.tp, groups.dp_cp) if pair.expert is None else (groups.expt_tp, groups.expt_dp)
        )
        replica = (0, 0 if place.axis is not None else tp.rank(), copies.rank())
        key = f"adapter.{pair.name}.{factor}"
        build = partial(_pieces, place, pair.expert)
        tensor = getattr(pair, factor)
        if place.axis is None or place.local_shape[place.axis] == place.grain:
            (only,) = build(key, tensor, replica)
            return only
        return ShardedTensorFactory(
            key, tensor, build, partial(_join, place.axis), replica_id=replica
        )


@contextmanager
def switched_off(adapters: Sequence[Adapter]) -> Iterator[None]:
    """Let the chunks of these adapters compute as if they had no factors.

    A tensor that an adapter trains whole, in place of a base weight, stays in use.
    """
    pairs = [pair for adapter in adapters for _, pair in adapter.pairs()]
    for pair in pairs:
        pair.on = False
    try:
        yield
    finally:
        for pair in pairs:
            pair.on = True


def _pieces(
    place: Place,
    expert: tuple[int, int] | None,
    key: str,
    tensor: Tensor,
    replica: Any,
    flattened_range: None = None,
) -> list[ShardedTensor]:
    """Divide a factor into parts of one regular grid, which is all that a checkpoint can hold."""
    stacked = 1 if expert else 0
    first = [(0, *expert)] if expert else []
    kept = {"replica_id": replica, "prepend_axis_num": stacked}
    if place.axis is None:
        return [ShardedTensor.from_rank_offsets(key, tensor, *first, **kept)]
    count = place.shape[place.axis] // place.grain
    pieces = []
    for span in place.spans:
        for step in range(0, span.length, place.grain):
            part = tensor.narrow(place.axis, span.local + step, place.grain)
            whole = tensor if part.shape == tensor.shape else part
            offset = (place.axis + stacked, (span.whole + step) // place.grain, count)
            pieces.append(ShardedTensor.from_rank_offsets(key, whole, *first, offset, **kept))
    return pieces


@torch.no_grad()
def _join(axis: int, pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces, dim=axis)
