"""Rename the router of transformers 4.57, a linear layer, to that of transformers 5, a parameter.

Adapters made with 4.57 name it in ``target_modules`` (``all-linear`` includes it). Keys and shapes
are the same as those of the parameter in transformers 5, with which PEFT refuses the old name.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_qwen3vl.converters.adapters.config import AdapterConfig


def names_a_linear_router(config: AdapterConfig) -> bool:
    """Return whether the config of a MoE model's adapter names the router in ``target_modules``."""
    modules = config.target_modules
    return isinstance(modules, tuple) and any(map(_is_router, modules))


def with_router_as_parameter(config: AdapterConfig) -> AdapterConfig:
    """Return the adapter's config for transformers 5, or `config` itself if it needs no change.

    A config that selects layers or excludes modules is returned unchanged, since PEFT does neither
    for parameters.
    """
    selects = config.exclude_modules or config.layers_to_transform is not None
    if not names_a_linear_router(config) or selects:
        return config
    modules = config.target_modules or ()
    routers = {f"{_spelled_out(name)}.weight" for name in modules if _is_router(name)}
    return replace(
        config,
        target_modules=tuple(name for name in modules if not _is_router(name)),
        target_parameters=(*(config.target_parameters or ()), *sorted(routers)),
        rank_pattern={_pattern(key): rank for key, rank in (config.rank_pattern or {}).items()},
        alpha_pattern={_pattern(key): a for key, a in (config.alpha_pattern or {}).items()},
    )


def _is_router(name: object) -> bool:
    return isinstance(name, str) and (name == "gate" or name.endswith(".gate"))


def _spelled_out(name: str) -> str:
    return "mlp.gate" if name == "gate" else name


def _pattern(key: str) -> str:
    return f"{_spelled_out(key)}.weight" if _is_router(key) else key
