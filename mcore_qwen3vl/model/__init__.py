"""The network: Qwen3-VL as a Megatron-Core model."""
