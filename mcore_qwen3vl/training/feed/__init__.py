"""From the data loader to the ranks of a run."""
