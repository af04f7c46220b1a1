"""Megatron-Core's ``torch_dist`` format: paths, metadata, reading and writing."""
