"""One report for every ``verify`` command: JSON and a page that needs nothing else."""
