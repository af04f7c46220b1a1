"""Finding the probe point where two models part, and why."""
