"""Why a checkpoint cannot be read, by the headers of its files.

A run killed while writing, or a full disk, leaves a checkpoint with missing, short or empty files.
With thousands of ranks, one of them should find that before Megatron starts reading.
"""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3vl.converters.identify import CHECKPOINT_CONFIG, DEFAULT_FORMAT
from mcore_qwen3vl.converters.megatron_checkpoint import FileRange
from mcore_qwen3vl.converters.torch_dist import read_metadata, refuse_other_format
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.json_and_yaml import read_object

_ZIP = b"PK\x03\x04"  # every stored tensor starts with a zip's first bytes


def find_damage(folder: Path) -> str | None:
    """Return why a torch_dist checkpoint cannot be read, or None. Reads headers, not tensors.

    Raises:
        BadInput: it is no damaged one, but has another format.
    """
    marker = folder / CHECKPOINT_CONFIG
    if not marker.exists() or marker.stat().st_size == 0:
        refuse_other_format(folder)
        return f"{marker} is missing or empty"
    try:
        backend = read_object(marker, marker.name, "").get("sharded_backend")
        if backend != DEFAULT_FORMAT:
            return f"{marker} names the format {backend!r:.40} instead of {DEFAULT_FORMAT}"
        index = read_metadata(folder)
    except BadInput as error:
        return str(error)
    chunks = [chunk.data for tensor in index.tensors.values() for chunk in tensor.chunks]
    by_file: dict[str, list[FileRange]] = {}
    for data in [*chunks, *index.objects.values()]:
        by_file.setdefault(data.file, []).append(data)
    reasons = (_find_damage_in_file(folder / name, ranges) for name, ranges in by_file.items())
    return next((reason for reason in reasons if reason), None)


def _find_damage_in_file(file: Path, ranges: list[FileRange]) -> str | None:
    """Return why a file lacks one of the stored tensors or objects at `ranges`, or None."""
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:  # such as a name that is too long
        return f"{file} cannot be read: {error.strerror}"
    needed = max(data.offset + data.length for data in ranges)
    if size < needed:
        return f"{file} has {size} bytes of {needed}"
    with file.open("rb") as stream:
        for data in ranges:
            stream.seek(data.offset)
            if stream.read(len(_ZIP)) != _ZIP:
                return f"{file} holds no tensor at byte {data.offset}"
    return None
