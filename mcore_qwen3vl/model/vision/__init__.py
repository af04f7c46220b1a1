"""Hugging Face's vision tower, shared over TP x CP ranks."""
