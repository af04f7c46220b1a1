"""The language model's decoder layer: its parts, and the specs that combine them."""
