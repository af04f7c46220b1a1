"""One step: forward, loss, what trains and at which rate."""
