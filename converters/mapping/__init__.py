"""The table of Hugging Face and Megatron-Core tensors, and its exact transforms."""
