"""The search for the first probe point where two models differ."""
