"""The data pipeline: from messages and documents to packed batches for the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_qwen3vl.data.config import DataConfig, MediaLimits, Source, parse_sources
    from mcore_qwen3vl.data.encoding.batch import IGNORED, Batch, Counts
    from mcore_qwen3vl.data.loader import Loader
    from mcore_qwen3vl.data.loader_state import redistribute
    from mcore_qwen3vl.data.processor import load_processor

__all__ = [
    "IGNORED",
    "Batch",
    "Counts",
    "DataConfig",
    "Loader",
    "MediaLimits",
    "Source",
    "load_processor",
    "parse_sources",
    "redistribute",
]

# Imported on first use: torch and energon take seconds to import, and a command line that only
# needs `config` for its flags should not wait for them.
_HOMES = {
    "config": ("DataConfig", "MediaLimits", "Source", "parse_sources"),
    "encoding.batch": ("IGNORED", "Batch", "Counts"),
    "loader": ("Loader",),
    "loader_state": ("redistribute",),
    "processor": ("load_processor",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
