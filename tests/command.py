"""The command line, run in this process."""

from __future__ import annotations

import pytest

from mcore_qwen3vl.cli import main


def exit_code(*words: object) -> int | str:
    """Run ``mcore-qwen3vl`` with these words, and return its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    return stopped.value.code or 0
