"""Reports of a run: summary, progress, metrics and logs."""
