"""Qwen3-VL and Qwen3.5 on Megatron-Core: the functions for a program of your own.

They are imported on first use, so ``import mcore_qwen3vl`` imports neither torch nor megatron.
"""

import sys

# Before other imports: Python is looking for the program of `python -m mcore_qwen3vl...`, and would
# find their modules in the current folder.
if sys.argv[:1] == ["-m"]:
    from mcore_qwen3vl.safe_path import leave_out_current_folder

    leave_out_current_folder()

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_qwen3vl.api import (
        ConversionReport,
        convert,
        generate,
        load_model,
        prepare_batch,
        reduce_gradients,
        save_model,
        score,
        verify,
    )
    from mcore_qwen3vl.data.processor import load_processor
    from mcore_qwen3vl.layout import Layout

__version__ = "0.1.0"

__all__ = [
    "ConversionReport",
    "Layout",
    "convert",
    "generate",
    "load_model",
    "load_processor",
    "prepare_batch",
    "reduce_gradients",
    "save_model",
    "score",
    "verify",
]

_HOMES = {"Layout": "layout", "load_processor": "data.processor"}
"""The modules of the names that are not in `api`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
