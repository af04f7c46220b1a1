"""What Megatron's checkpoint formats have in common: paths, chunked tensors, a registry."""
