"""A rehearsal as it is shown: on the terminal, and as a page."""
