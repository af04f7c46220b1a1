"""A second, frozen model on the ranks of a run: a live teacher, or the reference of a loss."""
