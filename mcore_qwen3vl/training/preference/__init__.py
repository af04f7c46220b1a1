"""Preference training in Megatron's loop: flags, the loss over pairs and the reference."""
