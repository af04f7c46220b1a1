"""Preference training in Megatron's loop: flags, the loss over pairs, the reference."""
