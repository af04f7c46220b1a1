"""Megatron-Core's ``torch_dist`` format: paths, metadata, reading and writing."""

from mcore_qwen3vl.converters.mcore.formats import Format
from mcore_qwen3vl.converters.torch_dist import metadata
from mcore_qwen3vl.converters.torch_dist.files import TorchDistCheckpoint

FORMAT = Format(
    name="torch_dist",
    title="the torch_dist format",
    recognises=lambda folder: (folder / metadata.FILE).is_file(),
    open=lambda path, architecture: TorchDistCheckpoint(path),
)
