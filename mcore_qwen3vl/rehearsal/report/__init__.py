"""A rehearsal's results on the terminal and as a page."""
