"""The folder for files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/mcore-qwen3vl`` (``~/.cache/mcore-qwen3vl``); it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mcore-qwen3vl"
