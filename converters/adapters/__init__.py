"""LoRA adapters as PEFT stores them: read, written, merged into a checkpoint."""
