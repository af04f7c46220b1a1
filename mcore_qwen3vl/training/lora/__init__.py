"""Training adapters with Megatron's loop: flags, the model, its checkpoints, PEFT directories."""
