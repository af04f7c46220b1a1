"""The path of batches from the data loader to the ranks of a run."""
