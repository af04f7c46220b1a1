"""Losses of preference and policy training, as pure functions of log-probabilities."""
