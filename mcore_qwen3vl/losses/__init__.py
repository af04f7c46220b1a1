"""What a run minimises: a file for each loss or family of losses, which holds all about it."""
