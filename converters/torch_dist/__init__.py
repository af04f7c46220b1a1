"""Megatron-Core's ``torch_dist`` format: paths, metadata, reading and writing."""

from mcore_qwen3vl.converters.megatron_checkpoint import Format
from mcore_qwen3vl.converters.torch_dist.files import TorchDistCheckpoint

FORMAT = Format(
    name="torch_dist",
    title="the torch_dist format",
    open=lambda folder, architecture: TorchDistCheckpoint(folder),
)
