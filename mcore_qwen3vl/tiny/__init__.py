"""Small random-weight Qwen3-VL checkpoints, complete with tokenizer, processor and chat template.

Everything is made locally: the demo, the tests and the benchmarks need no download.
"""

from mcore_qwen3vl.tiny.tiny_checkpoint import (
    SERVABLE,
    TINY,
    YARN,
    read_vocabulary,
    tiny_config,
    write_processor,
    write_random_weights,
    write_tiny_checkpoint,
)

__all__ = [
    "SERVABLE",
    "TINY",
    "YARN",
    "read_vocabulary",
    "tiny_config",
    "write_processor",
    "write_random_weights",
    "write_tiny_checkpoint",
]
