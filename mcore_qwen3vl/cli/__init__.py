"""The ``mcore-qwen3vl`` command. Every command is a thin call into the library.

Exit codes: 0 done, 1 a check failed, 2 bad input or usage.
"""

from mcore_qwen3vl.cli.app import app, main

__all__ = ["app", "main"]
