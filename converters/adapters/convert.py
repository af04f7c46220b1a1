"""Convert an adapter from one of PEFT's conventions to the other."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3vl.converters.adapters.adapter import Adapter
from mcore_qwen3vl.converters.adapters.config import with_router_as_parameter
from mcore_qwen3vl.converters.adapters.peft_model import HFConfig, config_content
from mcore_qwen3vl.converters.adapters.read import read_adapter
from mcore_qwen3vl.converters.adapters.roles import Roles
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
    """Copy an adapter, with the factors of fused experts converted to `roles`.

    A router that is named as in transformers 4.57 is renamed by `with_router_as_parameter`.
    Everything else stays as it is.

    Args:
        source, target: PEFT adapter directories.
        hf_config: the model's ``config.json``: its content, the file or its directory.
        roles: roles to write; see `roles`.
        from_roles: roles in `source`; needed if the shapes do not tell.
        force: replace an existing adapter.

    Returns:
        The adapter as it was read.

    Raises:
        BadInput: `read_adapter` or `write_adapter` raised it.
    """
    adapter = read_adapter(source, hf_config, roles=from_roles)
    config = with_router_as_parameter(adapter.config)
    base = config_content(hf_config)
    base = adapter.labels.in_config(base) if adapter.labels else base
    write_adapter(target, config, adapter.factors, adapter.saved, base, roles=roles, force=force)
    return adapter
