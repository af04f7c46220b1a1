"""The check of a converted checkpoint against its manifest, without the Hugging Face source."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.companions import read_form
from mcore_qwen3vl.converters.mapping.forms import renamed
from mcore_qwen3vl.converters.mapping.row import Row
from mcore_qwen3vl.converters.mapping.table import hf_shapes, table
from mcore_qwen3vl.converters.mcore.formats import open_megatron
from mcore_qwen3vl.converters.mcore.megatron_checkpoint import MegatronCheckpoint
from mcore_qwen3vl.converters.mcore.paths import hf_folder
from mcore_qwen3vl.converters.offline import manifest
from mcore_qwen3vl.converters.offline.engine import default_workers
from mcore_qwen3vl.converters.offline.manifest import CHECKSUM, stated_checksum
from mcore_qwen3vl.converters.offline.to_hf import stream_hf
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.converters.storage.staging import Meter, Progress
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.verify.checkpoints.bitwise import TENSORS
from mcore_qwen3vl.verify.report.measurement import Finding
from mcore_qwen3vl.verify.report.result import Report


def check_manifest(
    path: str | Path, *, workers: int | None = None, progress: Progress | None = None
) -> Report:
    """Compare the checksum of every HF tensor of an mcore checkpoint with its manifest.

    Args:
        path: a checkpoint that `hf_to_mcore` wrote; later iterations beside it are ignored.
        workers: threads; default two per core.
        progress: called with bytes done, total bytes and the current tensor.

    Returns:
        One finding for each HF tensor that the checkpoint or the manifest has.

    Raises:
        BadInput: there is no usable manifest, or the checkpoint is damaged, incomplete or not
            structured as its config says.
    """
    file = manifest.find(Path(path))
    if file is None:
        raise BadInput(
            f"{path} has no {manifest.FILE}. `convert hf-to-mcore` writes one; without it, compare "
            "with the source: `verify tensors`."
        )
    made = manifest.read(file)
    folder = file.parent / made["iteration"]
    architecture, form = Architecture.from_hf(hf_folder(folder)), read_form(hf_folder(folder))
    checkpoint = open_megatron(folder, architecture)
    rows = table(
        architecture,
        expert_layout=made["expert_layout"],
        padded_vocab_size=checkpoint.vocab_size,
        head=form.head.in_megatron,
    )
    checkpoint.require(rows)
    stated: dict[str, dict[str, Any]] = renamed(made["tensors"], form.names)
    problems = dict(_misfits(rows, checkpoint, stated))
    sound = {name: tensor for name, tensor in stated.items() if name not in problems}
    pieces = list(_pieces(rows, checkpoint, sound))
    meter = Meter(sum(piece.nbytes for piece in pieces), progress)
    wrong: dict[str, list[_Piece]] = {}
    lock = threading.Lock()

    def check(piece: _Piece) -> None:
        if piece.checksum(checkpoint) != piece.stated:
            with lock:
                wrong.setdefault(piece.name, []).append(piece)
        meter.add(piece.nbytes, piece.name)

    try:
        with ThreadPoolExecutor(workers or default_workers()) as pool:
            for _ in pool.map(check, pieces):
                pass
    except OSError as error:
        raise BadInput(f"{folder} cannot be read: {error}. Copy the checkpoint again.") from error
    problems |= {name: _difference(found) for name, found in wrong.items()}
    names = dict.fromkeys([*hf_shapes(rows), *stated])
    findings = [Finding(TENSORS, name, flaw=problems.get(name, "")) for name in names]
    return Report(f"{folder} and {file}", findings=findings)


@dataclass(frozen=True)
class _Piece:
    """One HF tensor, or one expert of it, and the checksum that the manifest states."""

    row: Row
    source: int
    dtype: torch.dtype
    stated: str

    @property
    def name(self) -> str:
        return self.row.sources[self.source].name

    @property
    def expert(self) -> int | None:
        return self.row.sources[self.source].index

    @property
    def nbytes(self) -> int:
        return prod(self.row.sources[self.source].piece_shape) * self.dtype.itemsize

    def checksum(self, checkpoint: MegatronCheckpoint) -> str:
        found = xxhash.xxh3_128()
        for chunk in stream_hf(checkpoint, self.row, self.source, self.dtype):
            found.update(as_bytes(chunk))
        return found.hexdigest()


def _pieces(
    rows: list[Row], checkpoint: MegatronCheckpoint, stated: dict[str, dict[str, Any]]
) -> Iterator[_Piece]:
    for row in rows:
        for number, source in enumerate(row.sources):
            if (one := stated_checksum(stated, source)) is not None:
                yield _Piece(row, number, checkpoint.dtype(row.key), one)


def _misfits(
    rows: list[Row], checkpoint: MegatronCheckpoint, stated: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield the tensors that differ from the manifest without reading their bytes, and how."""
    shapes = hf_shapes(rows)
    sources = [(row, source) for row in rows for source in row.sources]
    dtypes = {source.name: dtype_name(checkpoint.dtype(row.key)) for row, source in sources}
    fused = {source.name: source.index is not None for _, source in sources}
    for name, shape in shapes.items():
        if name not in stated:
            yield name, "is not in the manifest"
        elif tuple(stated[name]["shape"]) != shape:
            yield name, f"has shape {list(shape)}; the manifest says {stated[name]['shape']}"
        elif stated[name]["dtype"] != dtypes[name]:
            yield name, f"has dtype {dtypes[name]}; the manifest says {stated[name]['dtype']}"
        elif isinstance(stated[name][CHECKSUM], list) != fused[name]:
            yield name, "has a manifest entry of another form: fused experts have a checksum each"
    for name in stated:
        if name not in shapes:
            yield name, "is in the manifest, but not in the checkpoint"


def _difference(pieces: list[_Piece]) -> str:
    experts = sorted(piece.expert for piece in pieces if piece.expert is not None)
    if not experts:
        return "has other bytes than the manifest's checksum"
    listed = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
    return f"has other bytes than the manifest's checksums in experts {listed} ({len(experts)})"
