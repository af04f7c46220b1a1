"""The head: logits, and losses that are computed from them without holding them all."""
