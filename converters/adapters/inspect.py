"""Inspect a LoRA adapter: what it adapts, how large it is, whether it fits a model, and vLLM."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Adapter, AdapterFile, Roles, read_adapter
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class AdapterPart:
    """Parameters with the same rank, scaling and shapes whose names differ only in numbers.

    In `name`, ``*`` stands for a number; it is PEFT's key if the model is not known. `r` and
    `scaling` are those of `Factors`; None for a tensor that is stored whole or of an unknown model.
    """

    name: str
    count: int
    r: int | None
    scaling: float | None
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class AdapterInspection:
    """The result of `inspect_adapter`.

    Attributes:
        base: directory of the model that the adapter was checked against; None if it was not
            checked.
        roles: of the factors of fused experts; None without these or without a model.
        parts: the adapted parameters and those stored whole.
        notes: notes of the reader (see `Adapter`), and what vLLM would not serve.
    """

    path: str
    kind: str
    base: str | None
    config: dict[str, Any]
    roles: str | None
    parts: tuple[AdapterPart, ...]
    tensors: int
    parameters: int
    dtypes: tuple[str, ...]
    nbytes: int
    notes: tuple[str, ...]


def inspect_adapter(path: str | Path, hf_config: str | Path | None = None) -> AdapterInspection:
    """Inspect a PEFT adapter directory, and check it against its model if that is known.

    Args:
        hf_config: directory of the model's ``config.json``; default: the base that the adapter's
            config names, if it is a local directory.

    Raises:
        BadInput: the adapter is damaged, or does not fit the model.
    """
    path = Path(path)
    config = AdapterConfig.from_file(path)
    base = Path(hf_config) if hf_config is not None else base_directory(config)
    file = AdapterFile(path)
    roles: Roles | None = None
    notes: tuple[str, ...] = ()
    if base is None:
        keys = Counter((_pattern(key), shape) for key, shape in file.shapes.items())
        parts = [AdapterPart(key, n, None, None, (shape,)) for (key, shape), n in keys.items()]
    else:
        adapter = read_adapter(path, base)
        parts = _parts(adapter)
        architecture = Architecture.from_hf(base)
        notes = (*adapter.notes, *vllm_notes(adapter, architecture))
        if any(".mlp.experts." in name for name in adapter.factors):
            roles = adapter.roles
    sizes = {key: prod(shape) for key, shape in file.shapes.items()}
    return AdapterInspection(
        path=str(path),
        kind="adapter",
        base=None if base is None else str(base),
        config=config.to_dict(),
        roles=roles,
        parts=tuple(parts),
        tensors=len(sizes),
        parameters=sum(sizes.values()),
        dtypes=tuple(sorted({dtype_name(dtype) for dtype in file.dtypes.values()})),
        nbytes=sum(size * file.dtypes[key].itemsize for key, size in sizes.items()),
        notes=notes,
    )


def base_directory(config: AdapterConfig) -> Path | None:
    """Return the base model that an adapter's config names, if it is a local directory."""
    named = config.raw.get("base_model_name_or_path")
    if not isinstance(named, str) or not (Path(named) / "config.json").is_file():
        return None
    return Path(named)


def require_base(config: AdapterConfig, hf_config: str | Path | None) -> Path:
    """Return `hf_config`, or else the base that the adapter's config names.

    Raises:
        BadInput: `hf_config` is None and the base is not a local directory.
    """
    base = Path(hf_config) if hf_config is not None else base_directory(config)
    if base is None:
        named = config.raw.get("base_model_name_or_path")
        raise BadInput(
            f"the adapter's base model ({named!r:.100}) was not found, and its shapes are needed: "
            "pass the directory of its config.json, or a hub id, as --hf-config."
        )
    return base


def _parts(adapter: Adapter) -> list[AdapterPart]:
    alike: Counter[tuple[str, int | None, float | None, tuple[Shape, ...]]] = Counter()
    for name, f in adapter.factors.items():
        alike[_pattern(name), f.r, f.scaling, (tuple(f.a.shape), tuple(f.b.shape))] += 1
    for name, tensor in adapter.saved.items():
        alike[f"{_pattern(name)} (whole)", None, None, (tuple(tensor.shape),)] += 1
    return [AdapterPart(name, n, r, s, shapes) for (name, r, s, shapes), n in alike.items()]


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


DEFAULT_RANK = 16
RANKS = (1, 8, DEFAULT_RANK, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's ``--max-lora-rank`` accepts."""


def vllm_notes(
    adapter: Adapter, architecture: Architecture, roles: Roles | None = None
) -> tuple[str, ...]:
    """Return one sentence for each reason why vLLM would not serve the adapter as it is.

    The rules come from vLLM 0.33's sources: ``vllm/lora/peft_helper.py``, ``lora_model.py``,
    ``model_manager.py`` and ``vllm/config/lora.py``. ``tests/vllm/test_lora.py`` checks them with
    vLLM 0.32 on the CPU, except for those on models with experts, which vLLM does not adapt there.

    Args:
        roles: roles of its factors in the file; default: the roles that it was read with.
    """
    notes = []
    rank = max((factors.r for factors in adapter.factors.values()), default=0)
    if rank > RANKS[-1]:
        notes.append(
            f"vLLM refuses the adapter: its largest rank is {rank}, more than {RANKS[-1]}."
        )
    elif rank > DEFAULT_RANK:
        enough = min(size for size in RANKS if size >= rank)
        notes.append(
            f"vLLM needs max_lora_rank {enough} for rank {rank}; its default is {DEFAULT_RANK}."
        )
    if adapter.config.modules_to_save:
        notes.append("vLLM refuses adapters with modules_to_save: merge the adapter.")
    experts = {name.rpartition(".")[2] for name in adapter.factors if ".mlp.experts." in name}
    if len(experts) == 1:
        notes.append(
            f"vLLM refuses the adapter: in the fused experts it adapts only {min(experts)}, and "
            "vLLM needs gate_up_proj and down_proj together, or neither: merge the adapter."
        )
    if experts and (roles or adapter.roles) == "swapped":
        notes.append(
            "vLLM reads the factors of fused experts only in the canonical roles: convert the "
            "adapter with `mcore-qwen3vl lora convert --roles canonical`."
        )
    tower = [name for name in adapter.factors if name.startswith("model.visual.")]
    if tower:
        notes.append(
            f"vLLM ignores the {len(tower)} adapted parameters of vision tower and mergers "
            "unless enable_tower_connector_lora is set."
        )
    if architecture.is_moe and any(name.endswith("attn.qkv.weight") for name in tower):
        notes.append(
            "Even with enable_tower_connector_lora, vLLM ignores attn.qkv in the vision tower of a "
            "MoE model: merge the adapter."
        )
    return tuple(notes)
