"""Low-rank adapters (LoRA) on a running, sharded model: one pair of factors a Hugging Face tensor.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, as PEFT has it.
"""
