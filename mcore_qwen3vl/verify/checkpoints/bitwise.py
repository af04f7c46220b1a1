"""Bitwise comparison of two checkpoints as Hugging Face tensors, whatever format each is in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.converters.hf import config_file, fp8
from mcore_qwen3vl.converters.hf.companions import companion_files, digest, read_form
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.mapping.row import Row, max_rows
from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.converters.mcore.formats import is_megatron, open_megatron
from mcore_qwen3vl.converters.mcore.megatron_checkpoint import MegatronCheckpoint
from mcore_qwen3vl.converters.mcore.paths import hf_folder
from mcore_qwen3vl.converters.storage.boxes import Box
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.converters.storage.staging import Progress
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.verify.report.measurement import Finding, Measurement, measure
from mcore_qwen3vl.verify.report.result import Report

TENSORS, FILES = "tensors", "files"
"""The parts of the report."""


def compare_checkpoints(
    a: str | Path, b: str | Path, *, progress: Progress | None = None
) -> Report:
    """Compare every tensor bitwise and every companion file by content.

    Each side is an HF or an mcore checkpoint directory. Experts in different layouts are compared
    value by value all the same. NaNs compare by their bits. A tensor or file that cannot be
    compared has a flaw: ``only in A``, ``only in B``, or how the shapes or dtypes do not match.

    Returns:
        A report with findings of `TENSORS`, in the order of the network, and of `FILES`. It names
        other makers whose keys a side has.

    Raises:
        BadInput: a side is not a complete, well-formed checkpoint.
    """
    left, right = _Side(Path(a), other=Path(b)), _Side(Path(b), other=Path(a))
    makers = {name: side.maker for name, side in (("A", left), ("B", right)) if side.maker}
    environment = {f"{name} was written by": who for name, who in makers.items()}
    environment["tensors"] = "counted as Hugging Face stores them"
    result = Report(f"{a} and {b}", environment)
    total, done = sum(left.nbytes(name) for name in left.pieces), 0
    for name in left.pieces:
        result.findings.append(_compare(name, left, right))
        done += left.nbytes(name)
        if progress is not None:
            progress(done, total, name)
    only_b = (name for name in right.pieces if name not in left.pieces)
    result.findings += [Finding(TENSORS, name, flaw="only in B") for name in only_b]
    result.findings += _compare_files(left, right)
    return result


@dataclass(frozen=True)
class _Piece:
    """One HF tensor, or one expert of it, as blocks of rows of an mcore piece."""

    row: Row
    source: int


class _Side:
    """One checkpoint, read as pieces of mcore tensors, which are found by the HF tensor's name."""

    def __init__(self, path: Path, *, other: Path) -> None:
        folder = _config_folder(path) or _config_folder(other)
        if folder is None:
            raise BadInput(
                f"neither {path} nor {other} has a Hugging Face config, so the model's shape is "
                "not known. Put the config.json in its hf folder."
            )
        architecture = Architecture.from_hf(folder)
        self.stored: MegatronCheckpoint | HuggingFaceCheckpoint
        self.stored = (
            open_megatron(path, architecture) if is_megatron(path) else HuggingFaceCheckpoint(path)
        )
        self.companions = companion_files(folder) if _config_folder(path) else {}
        if isinstance(self.stored, MegatronCheckpoint):
            vocabulary, form = self.stored.vocab_size, read_form(folder)
        else:
            vocabulary, form = None, self.stored.form
        rows = table(architecture, padded_vocab_size=vocabulary, head=form.head)
        self.pieces: dict[str, list[_Piece]] = {}
        for row in rows:
            for number, source in enumerate(row.sources):
                if self._has(row, source.name):
                    self.pieces.setdefault(source.name, []).append(_Piece(row, number))
        for name in self._outside(rows):
            self.pieces[name] = []

    @property
    def maker(self) -> str | None:
        dialect = getattr(self.stored, "dialect", None)
        return None if dialect is None else dialect.maker

    def dtype(self, piece: _Piece) -> torch.dtype:
        if isinstance(self.stored, MegatronCheckpoint):
            return self.stored.dtype(piece.row.key)
        return self.stored.entries[piece.row.sources[piece.source].name].dtype

    def numel(self, name: str) -> int:
        shapes = (piece.row.sources[piece.source].piece_shape for piece in self.pieces[name])
        return sum(prod(shape) for shape in shapes)

    def nbytes(self, name: str) -> int:
        return self.numel(name) * self._itemsize(name)

    def take(self, row: Row, box: Box) -> Tensor:
        """Read a box of an mcore piece."""
        if isinstance(self.stored, MegatronCheckpoint):
            return self.stored.read(row, box)
        return row.take(self.stored.read, box)

    def digest(self, name: str) -> str:
        """Return a companion file's hash; that of a config leaves its quantisation settings out."""
        if name == "config.json" and getattr(self.stored, "quantization", None) is not None:
            config = fp8.without(read_config_file(self.companions[name]))
            return sha256(config_file.dumps(config)).hexdigest()
        return digest(self.companions[name])

    def _itemsize(self, name: str) -> int:
        pieces = self.pieces[name]
        return self.dtype(pieces[0]).itemsize if pieces else 0

    def _has(self, row: Row, name: str) -> bool:
        """Return whether the tensor is there with the shape that the config gives it."""
        if isinstance(self.stored, MegatronCheckpoint):
            stored = self.stored.index.tensors.get(row.key)
            return stored is not None and stored.shape == row.global_shape
        entry = self.stored.entries.get(name)
        return entry is not None and entry.shape in {s.shape for s in row.sources if s.name == name}

    def _outside(self, rows: list[Row]) -> list[str]:
        """Return the tensors that the model described by the config does not have."""
        if isinstance(self.stored, MegatronCheckpoint):
            return sorted(self.stored.model_keys() - {row.key for row in rows})
        return [name for name in self.stored.entries if name not in self.pieces]


def _config_folder(path: Path) -> Path | None:
    if is_megatron(path):
        try:
            return hf_folder(path)
        except BadInput:
            return None
    return path


def _compare(name: str, left: _Side, right: _Side) -> Finding:
    mine, theirs = left.pieces[name], right.pieces.get(name)
    if theirs is None:
        return Finding(TENSORS, name, flaw="only in A")
    if not mine or not theirs:
        return Finding(TENSORS, name, flaw="not the shape that the config gives it")
    if len(mine) != len(theirs) or mine[0].row.shape[1:] != theirs[0].row.shape[1:]:
        return Finding(TENSORS, name, flaw="the two configs give it different shapes")
    dtypes = left.dtype(mine[0]), right.dtype(theirs[0])
    if dtypes[0] != dtypes[1]:
        return Finding(TENSORS, name, flaw=f"dtypes {' and '.join(map(dtype_name, dtypes))}")
    measured = Measurement()
    for a, b in zip(mine, theirs, strict=True):
        measured += _measure(a, b, left, right)
    return Finding(TENSORS, name, measured, expected_count=left.numel(name))


def _measure(a: _Piece, b: _Piece, left: _Side, right: _Side) -> Measurement:
    """Compare one piece, block by block."""
    columns = tuple(slice(0, n) for n in a.row.shape[1:])
    step = max_rows(a.row, left.dtype(a))
    measured = Measurement()
    first = 0
    for block in a.row.rearrangement.blocks:
        last = first + block.stop - block.start
        for start in range(first, last, step) if block.source == a.source else ():
            box = (slice(start, min(start + step, last)), *columns)
            measured += measure(right.take(b.row, box), left.take(a.row, box), bitwise=True)
        first = last
    return measured


def _compare_files(left: _Side, right: _Side) -> Iterator[Finding]:
    a, b = left.companions, right.companions
    if not a or not b:  # a Megatron checkpoint that was written without them
        return
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            flaw = "only in A" if name in a else "only in B"
        else:
            flaw = "" if left.digest(name) == right.digest(name) else "differs"
        yield Finding(FILES, name, flaw=flaw)
