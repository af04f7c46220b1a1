"""Distillation in Megatron's loop: flags, and the divergence from a teacher."""
