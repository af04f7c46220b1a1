"""Finding the place where two models part, and why."""
