"""The command line, run in this process, and what one in another process printed."""

from __future__ import annotations

import re

import pytest

from mcore_qwen3vl.cli import main


def exit_code(*words: object) -> int | str:
    """Run ``mcore-qwen3vl`` with these words, and return its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    return stopped.value.code or 0


def without_version(printed: str) -> str:
    """Remove the line about another Megatron, which stands first on PYTHONPATH."""
    return re.sub(r"(?m)^warning: megatron-core \S+ is installed, .*\n", "", printed)
