"""The training run: arguments, and the model, data and loss providers of ``megatron.training``."""
