"""Comparison of this model with Hugging Face's, and how far they are apart."""
