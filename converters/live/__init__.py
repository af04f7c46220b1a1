"""The same table on a running, sharded model: load and export."""
