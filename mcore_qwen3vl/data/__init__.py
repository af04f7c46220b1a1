"""From messages and documents to packed batches that are ready for the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_qwen3vl.data.config import DataConfig, MediaLimits
    from mcore_qwen3vl.data.encoding.batch import IGNORED, Batch, Counts
    from mcore_qwen3vl.data.loading.loader import Loader, load_processor
    from mcore_qwen3vl.data.loading.sources import Source, parse_sources
    from mcore_qwen3vl.data.loading.state import redistribute

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

# Imported when asked for: torch and energon take seconds, and the flags of a command line, which
# are read from `config`, should not wait for them.
_HOMES = {
    "config": ("DataConfig", "MediaLimits"),
    "encoding.batch": ("IGNORED", "Batch", "Counts"),
    "loading.loader": ("Loader", "load_processor"),
    "loading.sources": ("Source", "parse_sources"),
    "loading.state": ("redistribute",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
