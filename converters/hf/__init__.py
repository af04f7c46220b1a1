"""Hugging Face checkpoints: reading, writing, config, companion files, FP8."""
