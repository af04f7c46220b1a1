"""Code shared by Megatron's checkpoint formats: paths, chunked tensors, a registry."""
