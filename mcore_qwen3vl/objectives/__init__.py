"""Losses of pairs, teachers, embeddings and scores, as pure functions, and their settings."""
