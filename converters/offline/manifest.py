"""``manifest.json``: what a converted checkpoint was made from, with a checksum of every tensor.

Checksums are of the Hugging Face tensors, as the conversion read them and after any cast. So a
converted checkpoint can be checked later without its source (`verify manifest`), and anyone can
check a Hugging Face checkpoint against the manifest with a few lines of code. A checksum covers one
tensor's bytes in row-major order, little-endian. A tensor that is moved in pieces has one checksum
per piece, in order. Fused experts have one per expert. A tensor of several mcore tensors has one
for each part of its rows, as ``rows`` lists them.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
import xxhash

from mcore_qwen3vl import __version__
from mcore_qwen3vl.converters.hf.companions import sha256_of
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.hf.quantized import SUFFIX
from mcore_qwen3vl.converters.identify import INDEX, PathKind, identify, origin_of
from mcore_qwen3vl.converters.mapping.table import SourceTensor
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.json_and_yaml import parse_json

FILE = "manifest.json"
FORMAT = 1
CHECKSUM = "xxh3_128"
SOURCE_CHECKSUM = f"source_{CHECKSUM}"

Checksum = tuple[str, int | Sequence[int] | None, str, str | None]
"""HF tensor, its piece (an expert, the first row and the one after the last, or None for all of
it), checksum, and checksum before a cast (or None)."""


def dumps(
    checkpoint: HuggingFaceCheckpoint,
    facts: dict[str, Any],
    dtype: torch.dtype | None,
    checksums: Iterable[Checksum],
) -> bytes:
    """Return the manifest's content; it depends only on the input, not on time or on resumed runs.

    Args:
        facts: other entries, which are the choices of the conversion.
        dtype: the one dtype that was written; None if each tensor kept its own.
        checksums: checksums of all pieces, with those of a tensor in order.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for name, piece, after, before in checksums:
        if name not in tensors:
            tensors[name] = _tensor_entry(checkpoint, name, dtype)
        for key, value in ((CHECKSUM, after), (SOURCE_CHECKSUM, before)):
            if value is not None and piece is None:
                tensors[name][key] = value
            elif value is not None:
                tensors[name].setdefault(key, []).append(value)
        if isinstance(piece, Sequence):
            tensors[name].setdefault("rows", []).append(list(piece))
    index = checkpoint.path / INDEX
    files = [*checkpoint.files, *([index] if index.exists() else [])]
    content = {
        "format": FORMAT,
        "direction": "hf-to-mcore",
        "versions": {
            "mcore-qwen3vl": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
            "xxhash": xxhash.VERSION,
        },
        "source": {  # what distinguishes it from another
            **origin_of(checkpoint.path),
            "config_sha256": sha256_of(checkpoint.path / "config.json"),
            "files": {file.name: file.stat().st_size for file in files},
        },
        **facts,
        "checksum": f"{CHECKSUM} of a tensor's bytes as converted, row-major and little-endian; "
        "of each expert apart where experts are fused",
    }
    stored = checkpoint.form.names.stored_name
    lines = ",\n".join(
        f"  {json.dumps(stored(name))}: {json.dumps(tensor)}" for name, tensor in tensors.items()
    )
    head = json.dumps(content, indent=1).removesuffix("\n}")
    return f'{head},\n "tensors": {{\n{lines}\n }}\n}}\n'.encode()


def _tensor_entry(
    checkpoint: HuggingFaceCheckpoint, name: str, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Return the manifest's entry for a tensor, without the checksums of its converted values."""
    entry = checkpoint.entries[name]
    tensor: dict[str, Any] = {
        "shape": list(entry.shape),
        "dtype": dtype_name(dtype or entry.dtype),
        "source_dtype": dtype_name(entry.stored),
    }
    if name in checkpoint.split:
        stored = checkpoint.form.names.stored_name
        parts = [tuple(map(stored, expert)) for expert in checkpoint.split[name].parts]
        tensor["source_tensors"] = [
            part.replace(".experts.0.", ".experts.{expert}.") for part in parts[0]
        ]
        scales = (f"{part}{SUFFIX}" for expert in parts for part in expert)
        factors = [
            _scale_entry(checkpoint, scale) for scale in scales if scale in checkpoint.scales
        ]
        tensor["source_scales"] = factors
    if entry.scale is not None:
        tensor["source_scale"] = _scale_entry(checkpoint, entry.scale)
    return tensor


def _scale_entry(checkpoint: HuggingFaceCheckpoint, name: str) -> dict[str, Any]:
    """Return the manifest's entry for the factors of a quantised tensor."""
    factors = checkpoint.read_stored(name)
    return {
        "name": name,
        "shape": list(factors.shape),
        "dtype": dtype_name(factors.dtype),
        CHECKSUM: xxhash.xxh3_128_hexdigest(as_bytes(factors)),
    }


def find(path: Path) -> Path | None:
    """Return the manifest of a checkpoint, or of an iteration's folder in it; None without one."""
    folders = (path, path.parent) if identify(path).kind is PathKind.MEGATRON else (path,)
    return next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)


def read(file: Path) -> dict[str, Any]:
    """Return a manifest's content, after checking that what readers need is there.

    Raises:
        BadInput: the file is damaged, or of another version.
    """
    try:
        manifest = parse_json(file.read_bytes())
        if manifest["format"] != FORMAT:
            raise BadInput(
                f"{file} has format {manifest['format']!r}; this version reads {FORMAT}."
            )
        _check_form(manifest)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{file} cannot be used as a manifest ({error!r}). Restore the one that was written "
            "with the checkpoint."
        ) from None
    return manifest


def _check_form(manifest: dict[str, Any]) -> None:
    """Raise an ordinary exception unless everything that is needed is there."""
    iteration, layout = manifest["iteration"], manifest["expert_layout"]
    if iteration != Path(iteration).name or iteration in ("", ".."):
        raise ValueError(f"iteration {iteration!r}")
    if layout not in (None, "published", "v5"):
        raise ValueError(f"expert_layout {layout!r}")
    if not manifest["tensors"]:
        raise ValueError("no tensors")
    for name, tensor in manifest["tensors"].items():
        shape, sums = tensor["shape"], tensor[CHECKSUM]
        if not all(type(n) is int for n in shape) or not isinstance(tensor["dtype"], str):
            raise ValueError(f"shape or dtype of {name}")
        parts = tensor.get("rows", [])
        if not all(type(n) is int for first, last in parts for n in (first, last)):
            raise ValueError(f"rows of {name}")
        count = len(parts or range(shape[0])) if isinstance(sums, list) else 1
        sums = sums if isinstance(sums, list) else [sums]
        if len(sums) != count or not all(isinstance(checksum, str) for checksum in sums):
            raise ValueError(f"{CHECKSUM} of {name}")


def stated_checksum(tensors: Mapping[str, dict[str, Any]], source: SourceTensor) -> str | None:
    """Return the checksum of a piece of an HF tensor; None without one, or one of another form.

    `tensors` are the manifest's, under the table's names.
    """
    if (entry := tensors.get(source.name)) is None:
        return None
    sums, pieces = entry[CHECKSUM], pieces_of(entry)
    if source.piece not in pieces:
        return None
    stated: str = sums if isinstance(sums, str) else sums[pieces.index(source.piece)]
    return stated


def pieces_of(entry: Mapping[str, Any]) -> list[int | tuple[int, int] | None]:
    """Return what each checksum of a tensor's entry covers, as `SourceTensor.piece` has it."""
    if isinstance(entry[CHECKSUM], str):
        return [None]
    if "rows" in entry:
        return [(first, last) for first, last in entry["rows"]]
    return list(range(len(entry[CHECKSUM])))
