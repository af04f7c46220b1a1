"""From conversations to batches: chat template, tokens, pixels, positions, packing."""
