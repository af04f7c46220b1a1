"""Turn an adapter from one of PEFT's conventions to the other."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3vl.converters.adapters.adapter import Adapter
from mcore_qwen3vl.converters.adapters.peft_model import HFConfig
from mcore_qwen3vl.converters.adapters.read import read_adapter
from mcore_qwen3vl.converters.adapters.roles import Roles
from mcore_qwen3vl.converters.adapters.router import with_router_as_parameter
from mcore_qwen3vl.converters.adapters.write import write_adapter


def convert_adapter(
    source: str | Path,
    target: str | Path,
    hf_config: HFConfig,
    *,
    roles: Roles,
    from_roles: Roles | None = None,
    force: bool = False,
) -> Adapter:
    """Write an adapter again, the factors of fused experts in `roles`.

    A router named as in transformers 4.57 is named as in 5 (see `router`); all else stays as it is.

    Args:
        source, target: PEFT adapter directories.
        hf_config: the model's ``config.json``: its content, the file or its directory.
        roles: to write; see `roles`.
        from_roles: those of `source`, where the shapes do not tell.
        force: replace an adapter that is there.

    Returns:
        The adapter as read.

    Raises:
        BadInput: see `read_adapter` and `write_adapter`.
    """
    adapter = read_adapter(source, hf_config, roles=from_roles)
    config = with_router_as_parameter(adapter.config)
    write_adapter(
        target, config, adapter.factors, adapter.saved, hf_config, roles=roles, force=force
    )
    return adapter
