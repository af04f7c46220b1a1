"""Compare two checkpoints bit for bit, as Hugging Face tensors, whatever format each is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters import mapping
from mcore_qwen3vl.converters.huggingface import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.mapping import Row
from mcore_qwen3vl.converters.megatron import MegatronCheckpoint, is_megatron
from mcore_qwen3vl.converters.plan import Progress, dtype_name, max_rows
from mcore_qwen3vl.converters.sidecar import digest, sidecar_files
from mcore_qwen3vl.converters.to_hf import hf_folder
from mcore_qwen3vl.converters.transforms import Box
from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class TensorFinding:
    """One tensor of the two checkpoints.

    Attributes:
        name: HF name.
        status: "equal"; "differs" in values, "dtype" or "shape"; "only in A" or "only in B".
        detail: for a difference, how many values differ and by how much at most.
        nbytes: bytes compared.
    """

    name: str
    status: str
    detail: str = ""
    nbytes: int = 0

    @property
    def ok(self) -> bool:
        return self.status == "equal"


@dataclass
class Comparison:
    """The result of `compare_checkpoints`.

    Attributes:
        a, b: what was compared.
        tensors: one finding a tensor, in the order of the network.
        files: status of every sidecar file: "equal", "differs", "only in A" or "only in B".
    """

    a: str
    b: str
    tensors: list[TensorFinding] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(finding.nbytes for finding in self.tensors)

    @property
    def tensors_equal(self) -> bool:
        return bool(self.tensors) and all(finding.ok for finding in self.tensors)

    @property
    def files_equal(self) -> bool:
        return all(status == "equal" for status in self.files.values())

    @property
    def ok(self) -> bool:
        return self.tensors_equal and self.files_equal

    @property
    def problems(self) -> list[str]:
        """What is not equal, one line each."""
        tensors = [f"{f.name}: {f.status} {f.detail}".rstrip() for f in self.tensors if not f.ok]
        return tensors + [f"{name}: {s}" for name, s in self.files.items() if s != "equal"]


def compare_checkpoints(
    a: str | Path, b: str | Path, *, progress: Progress | None = None
) -> Comparison:
    """Compare every tensor bitwise and every sidecar file by content.

    Each side is an HF or an mcore checkpoint directory. Experts in different layouts are compared
    as what they mean. NaNs compare by their bits.

    Raises:
        BadInput: a side is not a complete, well-formed checkpoint.
    """
    left, right = _Side(Path(a), other=Path(b)), _Side(Path(b), other=Path(a))
    result = Comparison(str(a), str(b))
    total, done = sum(left.nbytes(name) for name in left.pieces), 0
    for name in left.pieces:
        finding = _compare(name, left, right)
        done += left.nbytes(name)
        result.tensors.append(finding)
        if progress is not None:
            progress(done, total, name)
    only_b = (name for name in right.pieces if name not in left.pieces)
    result.tensors += [TensorFinding(name, "only in B") for name in only_b]
    result.files = _compare_files(left.sidecars, right.sidecars)
    return result


@dataclass(frozen=True)
class _Piece:
    """One HF tensor, or one expert of it, as blocks of rows of an mcore piece."""

    row: Row
    source: int


class _Side:
    """One checkpoint, read as pieces of mcore tensors; an HF tensor is found by its name."""

    def __init__(self, path: Path, *, other: Path) -> None:
        self.megatron = MegatronCheckpoint(path) if is_megatron(path) else None
        self.hf = HuggingFaceCheckpoint(path) if self.megatron is None else None
        folder = _config_folder(path) or _config_folder(other)
        if folder is None:
            raise BadInput(
                f"neither {path} nor {other} has a Hugging Face config, so the model's shape is "
                "not known. Put the config.json in its hf folder."
            )
        self.sidecars = sidecar_files(folder) if _config_folder(path) else {}
        vocabulary = self.megatron.vocab_size if self.megatron else None
        rows = mapping.table(Architecture.from_hf(folder), padded_vocab_size=vocabulary)
        self.pieces: dict[str, list[_Piece]] = {}
        for row in rows:
            for number, source in enumerate(row.sources):
                if self._has(row, source.name):
                    self.pieces.setdefault(source.name, []).append(_Piece(row, number))
        for name in self._outside(rows):
            self.pieces[name] = []

    def dtype(self, piece: _Piece) -> torch.dtype:
        if self.megatron is not None:
            return self.megatron.dtype(piece.row.key)
        assert self.hf is not None
        return self.hf.entries[piece.row.sources[piece.source].name].dtype

    def nbytes(self, name: str) -> int:
        shapes = (piece.row.sources[piece.source].piece_shape for piece in self.pieces[name])
        return sum(prod(shape) for shape in shapes) * self._itemsize(name)

    def take(self, row: Row, box: Box) -> Tensor:
        """A box of an mcore piece."""
        if self.megatron is not None:
            return self.megatron.read(row, box)
        hf = self.hf
        assert hf is not None
        return row.take(hf.read, box)

    def _itemsize(self, name: str) -> int:
        pieces = self.pieces[name]
        return self.dtype(pieces[0]).itemsize if pieces else 0

    def _has(self, row: Row, name: str) -> bool:
        """Whether the tensor is there with the shape that the config gives it."""
        if self.megatron is not None:
            stored = self.megatron.index.tensors.get(row.key)
            return stored is not None and stored.shape == row.global_shape
        assert self.hf is not None
        entry = self.hf.entries.get(name)
        return entry is not None and entry.shape in {s.shape for s in row.sources if s.name == name}

    def _outside(self, rows: list[Row]) -> list[str]:
        """Tensors that are no part of the model as the config describes it."""
        if self.megatron is not None:
            return sorted(self.megatron.model_keys() - {row.key for row in rows})
        assert self.hf is not None
        return [name for name in self.hf.entries if name not in self.pieces]


def _config_folder(path: Path) -> Path | None:
    if is_megatron(path):
        try:
            return hf_folder(path)
        except BadInput:
            return None
    return path


def _compare(name: str, left: _Side, right: _Side) -> TensorFinding:
    mine, theirs = left.pieces[name], right.pieces.get(name)
    if theirs is None:
        return TensorFinding(name, "only in A")
    if not mine or not theirs:
        return TensorFinding(name, "shape", "not the shape that the config gives it")
    if len(mine) != len(theirs) or mine[0].row.shape[1:] != theirs[0].row.shape[1:]:
        return TensorFinding(name, "shape", "the two configs give it different shapes")
    dtypes = left.dtype(mine[0]), right.dtype(theirs[0])
    if dtypes[0] != dtypes[1]:
        return TensorFinding(name, "dtype", " and ".join(map(dtype_name, dtypes)))
    different, largest = 0, 0.0
    for a, b in zip(mine, theirs, strict=True):
        count, distance = _difference(a, b, left, right)
        different, largest = different + count, max(largest, distance)
    nbytes = left.nbytes(name)
    if different:
        detail = f"{different} values, by at most {largest:.3g}"
        return TensorFinding(name, "differs", detail, nbytes)
    return TensorFinding(name, "equal", nbytes=nbytes)


def _difference(a: _Piece, b: _Piece, left: _Side, right: _Side) -> tuple[int, float]:
    """How many values of one piece differ in any bit, and the largest distance."""
    columns = tuple(slice(0, n) for n in a.row.shape[1:])
    step = max_rows(a.row, left.dtype(a))
    count, largest = 0, 0.0
    first = 0
    for block in a.row.rearrangement.blocks:
        last = first + block.stop - block.start
        for start in range(first, last, step) if block.source == a.source else ():
            box = (slice(start, min(start + step, last)), *columns)
            mine, theirs = left.take(a.row, box), right.take(b.row, box)
            bits = {2: torch.int16, 4: torch.int32}[mine.element_size()]
            if torch.equal(mine.view(bits), theirs.view(bits)):
                continue
            count += int((mine.view(bits) != theirs.view(bits)).sum())
            largest = max(largest, float((mine.double() - theirs.double()).abs().max()))
        first = last
    return count, largest


def _compare_files(a: dict[str, Path], b: dict[str, Path]) -> dict[str, str]:
    status = {}
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            status[name] = "only in A" if name in a else "only in B"
        else:
            status[name] = "equal" if digest(a[name]) == digest(b[name]) else "differs"
    return status
