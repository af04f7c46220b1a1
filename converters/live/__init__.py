"""Load and export of a running, sharded model, with the same table."""
