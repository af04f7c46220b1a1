"""The head: logits, and what is computed from them without ever holding them all."""
