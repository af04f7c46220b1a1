"""Generation of text from images, videos and prompts: prefill, then decoding with a KV cache."""
