"""Checks that what this package makes is what Hugging Face has; the product never imports it."""
