"""Write or convert PEFT's adapter directory: ``adapter_config.json`` and the weights beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters import config as config_file
from mcore_qwen3vl.converters.adapters.adapter import (
    BASE_LAYER,
    WEIGHTS,
    Adapter,
    Factors,
    is_adapter,
    some,
    whole_shape,
)
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, with_router_as_parameter
from mcore_qwen3vl.converters.adapters.peft_model import (
    EMBEDDING,
    HEAD,
    PREFIX,
    Applied,
    HFConfig,
    apply,
    config_content,
    has_score,
)
from mcore_qwen3vl.converters.adapters.read import read_adapter
from mcore_qwen3vl.converters.adapters.roles import Roles, swap
from mcore_qwen3vl.converters.hf.config_file import dumps
from mcore_qwen3vl.converters.storage.dtypes import DTYPES, dtype_name
from mcore_qwen3vl.converters.storage.staging import staging, write_durably
from mcore_qwen3vl.errors import BadInput


def write_adapter(
    path: str | Path,
    config: AdapterConfig,
    factors: Mapping[str, Factors],
    saved: Mapping[str, Tensor],
    hf_config: HFConfig,
    *,
    roles: Roles = "canonical",
    force: bool = False,
) -> None:
    """Write a PEFT adapter directory, which appears complete or not at all.

    Args:
        factors: all factors that the config calls for, by Hugging Face parameter, in the canonical
            roles.
        saved: all parameters that the config stores whole; one of two tied embeddings is enough. A
            parameter that also has factors is stored as their base layer.

    Raises:
        BadInput: the tensors are not those that `config` calls for; `path` exists and `force` is
            not set, or is not an adapter; or writing failed, in which case nothing is left.
    """
    config.require_supported()
    applied = apply(config, hf_config, linear_router=True)
    tied = Architecture.from_hf(config_content(hf_config)).tie_word_embeddings
    tensors = dict(_stored(applied, factors, _with_tied(saved, applied, tied), roles))
    config = _spelled_out(config, applied)
    target = Path(path)
    with staging(target, os.urandom(8).hex(), force=force, replaceable=is_adapter) as stage:
        try:
            save_file(tensors, stage.tree / WEIGHTS, metadata={"format": "pt"})
            with (stage.tree / WEIGHTS).open("rb+") as handle:
                os.fsync(handle.fileno())
            write_durably(stage.tree / config_file.FILE, config.to_json().encode())
            if has_score(config):  # PEFT's file does not name the labels
                write_durably(stage.tree / "config.json", dumps(config_content(hf_config)))
            stage.publish()
        except Exception as error:  # safetensors has its own exception for a full disk
            raise BadInput(f"{target} cannot be written: {error!s:.200}.") from error


def _with_tied(saved: Mapping[str, Tensor], applied: Applied, tied: bool) -> dict[str, Tensor]:
    """Return `saved` with both of the tied embeddings if only one of them was given."""
    both = {HEAD, EMBEDDING}
    given = dict(saved)
    if tied and both <= set(applied.saved) and len(both & set(given)) == 1:
        (one,) = both & set(given)
        (other,) = both - {one}
        given[other] = given[one]
    return given


def _stored(
    applied: Applied, factors: Mapping[str, Factors], saved: Mapping[str, Tensor], roles: Roles
) -> Iterator[tuple[str, Tensor]]:
    """Check that the given tensors are those of the config; yield PEFT's keys and tensors."""
    whole = set(saved) - set(factors)
    for what, given, wanted in (
        ("factors", set(factors), set(applied.slots)),
        ("whole tensors", whole, set(applied.saved)),
    ):
        if given != wanted:
            names = sorted(given ^ wanted)
            raise BadInput(f"the {what} given are not those the config calls for: {some(names)}.")
    memory: set[int] = set()
    for name, slot in applied.slots.items():
        a, b = factors[name].a, factors[name].b
        if (tuple(a.shape), tuple(b.shape)) != (slot.a_shape, slot.b_shape):
            raise BadInput(
                f"the factors of {name} are {list(a.shape)} and {list(b.shape)}; the config makes "
                f"them {list(slot.a_shape)} and {list(slot.b_shape)}."
            )
        if len(slot.base) == 3 and roles == "swapped":
            a, b = swap(a, b, slot.base[0])
        yield slot.a_key, _own(a, memory)
        yield slot.b_key, _own(b, memory)
    for name, tensor in saved.items():
        if tuple(tensor.shape) != whole_shape(name, applied):
            raise BadInput(
                f"{name} is {list(tensor.shape)} and not {list(whole_shape(name, applied))}."
            )
        yield (BASE_LAYER if name in factors else f"{PREFIX}{name}"), _own(tensor, memory)


def _own(tensor: Tensor, memory: set[int]) -> Tensor:
    """Return `tensor`, contiguous and in its own memory: safetensors refuses shared memory."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype not in DTYPES.values():
        raise BadInput(
            f"adapters are stored as {', '.join(DTYPES)}, not {dtype_name(tensor.dtype)}."
        )
    if tensor.data_ptr() in memory:
        tensor = tensor.clone()
    memory.add(tensor.data_ptr())
    return tensor


def _spelled_out(config: AdapterConfig, applied: Applied) -> AdapterConfig:
    """Replace ``all-linear`` by the names that it matches, as PEFT does; releases differ on it."""
    targets = config.target_modules
    if not isinstance(targets, str) or targets.lower() != "all-linear":
        return config
    return replace(config, target_modules=applied.spelled_out)


def convert_adapter(
    source: str | Path,
    target: str | Path,
    hf_config: HFConfig,
    *,
    roles: Roles,
    from_roles: Roles | None = None,
    force: bool = False,
) -> Adapter:
    """Copy an adapter, with the factors of fused experts converted to `roles`.

    A router that is named as in transformers 4.57 is renamed by `with_router_as_parameter`.
    Everything else stays as it is.

    Args:
        from_roles: roles in `source`; needed if the shapes do not tell.

    Raises:
        BadInput: `read_adapter` or `write_adapter` raised it.
    """
    adapter = read_adapter(source, hf_config, roles=from_roles)
    config = with_router_as_parameter(adapter.config)
    base = config_content(hf_config)
    base = adapter.labels.in_config(base) if adapter.labels else base
    write_adapter(target, config, adapter.factors, adapter.saved, base, roles=roles, force=force)
    return adapter
