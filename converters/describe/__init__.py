"""Inspection of checkpoints and adapters, and estimates of conversions."""
