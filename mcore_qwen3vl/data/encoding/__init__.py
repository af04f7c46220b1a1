"""From conversations to batches: tokens, pixels, positions, packing."""
