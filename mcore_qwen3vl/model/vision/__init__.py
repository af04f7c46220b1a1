"""Hugging Face's vision tower, its work shared by the TP x CP ranks."""
