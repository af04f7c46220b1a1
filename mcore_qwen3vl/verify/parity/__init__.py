"""Comparing this model with Hugging Face's, and saying how far they are apart."""
