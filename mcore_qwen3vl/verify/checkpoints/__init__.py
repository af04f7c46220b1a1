"""Comparison of checkpoints with each other and with their manifests."""
