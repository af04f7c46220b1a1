"""Inspect a LoRA adapter: what it adapts, how large it is, and whether it fits a model."""

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
from mcore_qwen3vl.converters.adapters.vllm import vllm_notes
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
    base = base_directory(config, hf_config)
    file = AdapterFile(path)
    roles: Roles | None = None
    notes: tuple[str, ...] = ()
    if base is None:
        keys = Counter((_with_stars(key), shape) for key, shape in file.shapes.items())
        parts = [AdapterPart(key, n, None, None, (shape,)) for (key, shape), n in keys.items()]
    else:
        adapter = read_adapter(path, base)
        parts = _adapter_parts(adapter)
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


def base_directory(config: AdapterConfig, hf_config: str | Path | None) -> Path | None:
    """Return `hf_config`, or else the base named by the adapter, if it is a local directory."""
    if hf_config is not None:
        return Path(hf_config)
    named = config.raw.get("base_model_name_or_path")
    if not isinstance(named, str) or not (Path(named) / "config.json").is_file():
        return None
    return Path(named)


def require_base(config: AdapterConfig, hf_config: str | Path | None) -> Path:
    """Return the directory that `base_directory` finds; raise BadInput if there is none."""
    if (base := base_directory(config, hf_config)) is None:
        named = config.raw.get("base_model_name_or_path")
        raise BadInput(
            f"the adapter's base model ({named!r:.100}) was not found, and its shapes are needed: "
            "pass the directory of its config.json, or a hub id, as --hf-config."
        )
    return base


def _adapter_parts(adapter: Adapter) -> list[AdapterPart]:
    """Group parameters that differ only in numbers of their names."""
    alike: Counter[tuple[str, int | None, float | None, tuple[Shape, ...]]] = Counter()
    for name, f in adapter.factors.items():
        alike[_with_stars(name), f.r, f.scaling, (tuple(f.a.shape), tuple(f.b.shape))] += 1
    for name, tensor in adapter.saved.items():
        alike[f"{_with_stars(name)} (whole)", None, None, (tuple(tensor.shape),)] += 1
    return [AdapterPart(name, n, r, s, shapes) for (name, r, s, shapes), n in alike.items()]


def _with_stars(name: str) -> str:
    """Return `name` with ``*`` for each number between dots."""
    return re.sub(r"\.\d+\.", ".*.", name)
