"""Megatron's legacy format, ``--ckpt-format torch``."""
