"""A layer of the language model: its parts, and the specs that put them together."""
