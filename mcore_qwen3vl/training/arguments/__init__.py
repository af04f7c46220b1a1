"""Command-line flags: ours, Megatron's, and those that the model's config sets."""
