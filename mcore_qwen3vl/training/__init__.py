"""What ``megatron.training`` asks for: arguments, model, data and loss providers."""
