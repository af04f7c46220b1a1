"""Find the first probe point where two models differ, and the cause."""
