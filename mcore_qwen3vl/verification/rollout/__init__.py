"""``verify rollout``: what makes a server's log-probabilities differ from the trained model's."""
