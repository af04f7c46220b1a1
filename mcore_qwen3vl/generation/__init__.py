"""Generation of text from images, videos and prompts: prefill, then decode with a KV cache."""

from mcore_qwen3vl.generation.decoding import Generation, generate, load_generation_config

__all__ = ["Generation", "generate", "load_generation_config"]
