"""Phases of an iteration to which waits of the host are booked; the rest is ``other``."""

FORWARD_BACKWARD, FINALIZE = "forward and backward", "finalize gradients"
LOG = "log"
"""What follows an iteration counts to the next one: after the first, and every --log-interval."""
FORWARD, BACKWARD = "forward", "backward"
"""Parts of a micro-batch's work."""
