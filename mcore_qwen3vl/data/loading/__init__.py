"""Reading data sets with energon: indices, workers, resumable state."""
