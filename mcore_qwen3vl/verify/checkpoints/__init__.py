"""Checkpoints against each other and against their manifest."""
