"""Command-line flags: ours beside Megatron's, and what the model's config fixes."""
