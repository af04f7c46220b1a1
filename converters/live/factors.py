"""Load and read the factors of a running model's adapters, in PEFT's names and shapes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import is_main_replica
from torch import Tensor, nn

from mcore_qwen3vl.converters.live.sharded import ADAPTER, Part, Values, unwrap, weight
from mcore_qwen3vl.converters.storage.boxes import Shape


def factor_parts(
    models: nn.Module | Sequence[nn.Module], values: Values = weight
) -> Iterator[Part]:
    """Yield every local factor, cut into parts of PEFT's tensors.

    Args:
        values: returns the tensor to cut for each factor; None leaves the factor out.

    Yields:
        Parts whose `name` is that of the Hugging Face parameter and the factor, as in
        ``model.language_model.layers.0.self_attn.q_proj.weight.lora_A``. The box of a part refers
        to PEFT's tensor: for experts (E * r, in) or (out, r * E).
    """
    for chunk in unwrap(models):
        if chunk.adapter is None:
            continue
        entries = chunk.adapter.sharded_state_dict(ADAPTER)
        for path, pair in chunk.adapter.pairs():
            for factor in pair.places:
                name = f"{ADAPTER}{path}.{factor}"
                tensor = values(getattr(pair, factor))
                if tensor is None or name not in entries:
                    continue
                main = is_main_replica(entries[name].replica_id)
                for box, local in pair.parts(factor, tensor):
                    yield Part(f"{pair.name}.{factor}", box, local, main, name)


def local_shapes(models: nn.Module | Sequence[nn.Module]) -> dict[str, Shape]:
    """Return the shapes of PEFT's tensors that this rank holds parts of, by `Part.name`."""
    return {
        f"{pair.name}.{factor}": pair.whole_shape(factor)
        for chunk in unwrap(models)
        if chunk.adapter is not None
        for _, pair in chunk.adapter.pairs()
        for factor in pair.places
    }


@torch.no_grad()
def load_factors(models: nn.Module | Sequence[nn.Module], factors: Mapping[str, Any]) -> None:
    """Fill every factor that this rank holds.

    Args:
        factors: factors by Hugging Face parameter name, with ``a`` and ``b`` in PEFT's shapes.
            Values are cast to the parameters' dtype.
    """
    for part in factor_parts(models):
        name, _, factor = part.name.rpartition(".")
        whole: Tensor = factors[name].a if factor == "lora_A" else factors[name].b
        part.local.copy_(whole[part.box])


@torch.no_grad()
def initialize_factors(models: nn.Module | Sequence[nn.Module], seed: int) -> None:
    """Initialise as PEFT does: A uniform within 1 / sqrt(in) of zero, B zero.

    The values are the same under every layout.
    """
    shapes = local_shapes(models)
    by_name: dict[str, list[Part]] = {}
    for part in factor_parts(models):
        by_name.setdefault(part.name, []).append(part)
    for name, parts in by_name.items():
        if name.endswith("lora_B"):
            _fill(parts, torch.zeros(()).expand(shapes[name]))
            continue
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        bound = shapes[name][1] ** -0.5
        whole = torch.empty(shapes[name], dtype=torch.float32)
        _fill(parts, whole.uniform_(-bound, bound, generator=generator))


def _fill(parts: Iterable[Part], whole: Tensor) -> None:
    for part in parts:
        part.local.copy_(whole[part.box])
