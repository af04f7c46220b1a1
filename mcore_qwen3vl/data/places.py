"""The place of a record in its file, by which messages name it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.energon.flavors.webdataset.config import split_name_re
from megatron.energon.source_info import SourceInfo, get_source_info

from mcore_qwen3vl.data.indexes import line_of, origin


@dataclass(frozen=True)
class RecordPlace:
    """The place of a record in its file."""

    file: Path
    number: int
    """The line of a JSONL file, or the record of another file or of a folder of tars, from 1."""
    key: str | None = None
    """The key of a sample of a tar, in whose file names it is."""

    @property
    def is_line(self) -> bool:
        """Whether `number` is a line, as an editor counts them."""
        return self.file.suffix == ".jsonl"

    def __str__(self) -> str:
        if self.is_line:
            return f"{self.file}:{self.number}"
        return f"{self.file}[{self.number if self.key is None else self.key}]"


def place_of(source: SourceInfo) -> RecordPlace:
    """Return the place from which energon read a sample."""
    indexed = Path(str(source.dataset_path))
    dataset = origin(indexed)
    if dataset.suffix == ".jsonl":
        return RecordPlace(dataset, line_of(indexed, int(source.index)))
    file = dataset if source.shard_name == dataset.name else dataset / source.shard_name
    name = source.file_names[0] if file.suffix == ".tar" and source.file_names else ""
    match = split_name_re.match(name)
    return RecordPlace(file, int(source.index) + 1, match and match[1])


def number_of(sample: Any) -> int:
    """Return the number, from 0, that a sample's record has in its file."""
    return int(get_source_info(sample)[0].index)


def sample_id(sample: Any) -> str:
    """Return where a sample comes from: ``file:line`` for JSONL, else ``file[record]``."""
    # energon passes the raw tuple of a joined sample, or a list of samples, to its error handler
    inner = getattr(sample, "data", sample)
    inner = inner[0] if isinstance(inner, list | tuple) and inner else inner
    sources = get_source_info(inner)
    if not sources:
        return str(inner["__key__"] if isinstance(inner, dict) else inner)[:200]
    return str(place_of(sources[0]))
