"""LoRA training in Megatron's loop: flags, the model, its checkpoints and PEFT directories."""
