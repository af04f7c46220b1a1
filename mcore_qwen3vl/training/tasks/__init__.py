"""Training for tasks other than predicting tokens: flags, pooling and losses."""
