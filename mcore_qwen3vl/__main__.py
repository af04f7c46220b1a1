"""``python -m mcore_qwen3vl`` is the command ``mcore-qwen3vl``."""

from mcore_qwen3vl.cli import main

main()
