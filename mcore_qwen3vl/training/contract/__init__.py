"""What decides the result of a run, how it is kept in a checkpoint, and what may change later."""
