"""Phases of an iteration by which host syncs are counted; all others count as ``other``."""

FORWARD_BACKWARD, FINALIZE = "forward and backward", "finalize gradients"
LOG = "log"
"""Logging counts towards the next iteration: after the first one and every --log-interval."""
FORWARD, BACKWARD = "forward", "backward"
"""The two parts of a micro-batch's work."""
