"""Training of embedding models in Megatron's loop: flags, pooling and the contrastive loss."""
