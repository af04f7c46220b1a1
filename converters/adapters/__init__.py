"""LoRA adapters as PEFT stores them: read, written, described, merged into a checkpoint."""
