"""Qwen3-VL on Megatron-Core."""

__version__ = "0.1.0"
