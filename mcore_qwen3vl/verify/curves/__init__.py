"""Training against a plain Hugging Face loop, and against itself after a stop."""
