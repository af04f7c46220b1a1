"""Low-rank adapters (LoRA) on a running, sharded model: a pair of factors per Hugging Face tensor.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, as in PEFT.
"""
