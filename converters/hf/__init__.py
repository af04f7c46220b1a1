"""Hugging Face checkpoints: reading, writing, config, companion files, the hub, FP8."""
