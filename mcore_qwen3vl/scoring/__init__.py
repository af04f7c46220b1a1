"""Log-probabilities of the records of a data set, under any layout."""
