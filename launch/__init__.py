"""Scripts that start training; ``mcore-qwen3vl launch`` lists, shows and copies them."""
