"""Comparison of training with a plain Hugging Face loop, and with itself after a stop."""
