"""One training step: forward, loss, gradients and optimizer."""
