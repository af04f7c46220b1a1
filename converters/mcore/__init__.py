"""Code shared by Megatron's checkpoint formats: the index, the registry, what is saved beside."""
