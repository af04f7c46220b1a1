"""Qwen3-VL on Megatron-Core."""

import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # Python is looking for the program of `python -m mcore_qwen3vl...`
    from mcore_qwen3vl.safe_path import leave_out_current_folder

    leave_out_current_folder()
