"""From messages and documents to packed batches that are ready for the model."""

from mcore_qwen3vl.data.config import DataConfig, MediaLimits
from mcore_qwen3vl.data.encoding.batch import IGNORED, Batch, Counts
from mcore_qwen3vl.data.loading.loader import Loader, Source, load_processor, parse_sources
from mcore_qwen3vl.data.loading.state import redistribute

__all__ = [
    "IGNORED",
    "Batch",
    "Counts",
    "DataConfig",
    "Loader",
    "MediaLimits",
    "Source",
    "load_processor",
    "parse_sources",
    "redistribute",
]
