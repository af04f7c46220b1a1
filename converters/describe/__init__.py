"""What a checkpoint is, and what converting it will take."""
