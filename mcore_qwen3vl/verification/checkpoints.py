"""Bitwise comparison of checkpoints, as Hugging Face tensors: with each other or a manifest.

In a round trip a checkpoint goes to Megatron-Core and back, an adapter through a sharded model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.converters.adapters.adapter import Adapter, read_adapter
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.formats import open_megatron
from mcore_qwen3vl.converters.hf import config_file, quantized
from mcore_qwen3vl.converters.hf.companions import companion_files, read_form, sha256_of
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.identify import PathKind, identify
from mcore_qwen3vl.converters.mapping.forms import rename_entries
from mcore_qwen3vl.converters.mapping.table import (
    MTP,
    Row,
    SourceTensor,
    hf_shapes,
    max_rows,
    table,
)
from mcore_qwen3vl.converters.megatron_checkpoint import MegatronCheckpoint
from mcore_qwen3vl.converters.offline import manifest
from mcore_qwen3vl.converters.offline.engine import ConversionResult, Interrupted, default_workers
from mcore_qwen3vl.converters.offline.manifest import stated_checksum
from mcore_qwen3vl.converters.offline.to_hf import stream_hf
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.boxes import Box
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.converters.storage.staging import Meter, Progress
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.verification.measurement import Finding, Measurement, measure
from mcore_qwen3vl.verification.report import Report

TENSORS, FILES = "tensors", "files"
"""The parts of the report."""

ONLY_A, ONLY_B = "only in A", "only in B"
"""Flaws of what only one side has."""

_ONE_SIDE = (ONLY_A, ONLY_B)


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
    folders = [_config_folder(Path(path)) for path in (a, b)]
    folder = folders[0] or folders[1]
    if folder is None:
        raise BadInput(
            f"neither {a} nor {b} has a Hugging Face config, so the model's shape is not known. "
            "Put the config.json in its hf folder."
        )
    left, right = Side(Path(a), folder), Side(Path(b), folders[1] or folder)
    sides = (("A", left), ("B", right))
    environment = {f"{name} was written by": side.maker for name, side in sides if side.maker}
    environment["tensors"] = "counted as Hugging Face stores them"
    findings = [*compare_sides(left, right, progress), *_compare_files(left, right)]
    if left.leaves_mtp_out != right.leaves_mtp_out:
        untrained = [found for found in findings if _is_of_mtp(found) and found.flaw in _ONE_SIDE]
        findings = [found for found in findings if found not in untrained]
        if untrained:
            environment["not compared"] = (
                f"{len(untrained)} tensors {MTP}*: the run does not train them, so that its "
                "checkpoints have none, and its exports have those of --hf-model"
            )
    return Report(f"{a} and {b}", environment, findings)


def _is_of_mtp(finding: Finding) -> bool:
    return finding.part == TENSORS and finding.name.startswith(MTP)


def compare_sides(
    left: Side, right: Side, progress: Progress | None = None, *, rounded: bool = False
) -> Iterator[Finding]:
    """Compare every tensor of `left` (A) and `right` (B), as :func:`compare_checkpoints` does.

    Args:
        rounded: compare with the values of B in A's dtype, so that the dtypes may differ.
    """
    total, done = sum(left.nbytes(name) for name in left.pieces), 0
    for name in left.pieces:
        yield _compare_tensor(name, left, right, rounded)
        done += left.nbytes(name)
        if progress is not None:
            progress(done, total, name)
    only_b = (name for name in right.pieces if name not in left.pieces)
    yield from (Finding(TENSORS, name, flaw=ONLY_B) for name in only_b)


@dataclass(frozen=True)
class _Piece:
    """One HF tensor, or one piece of it, as blocks of rows of an mcore piece."""

    row: Row
    number: int

    @property
    def source(self) -> SourceTensor:
        return self.row.sources[self.number]

    @property
    def numel(self) -> int:
        return prod(self.source.piece_shape)


class Side:
    """One checkpoint, read as pieces of mcore tensors, which are found by the HF tensor's name.

    `config` is a folder with the Hugging Face config that describes it.
    """

    def __init__(self, path: Path, config: Path) -> None:
        place, folder = identify(path), _config_folder(path)
        self._iteration = place.iteration
        self.architecture = architecture = Architecture.from_hf(config)
        self.stored: MegatronCheckpoint | HuggingFaceCheckpoint
        self.stored = (
            HuggingFaceCheckpoint(path)
            if place.kind in (PathKind.HUGGINGFACE, PathKind.CONFIG)
            else open_megatron(place, architecture)
        )
        self.companions = companion_files(folder) if folder else {}
        if isinstance(self.stored, MegatronCheckpoint):
            vocabulary, form = self.stored.vocab_size, read_form(config)
        else:
            vocabulary, form = None, self.stored.form
        mtp = self.stored.has_mtp
        rows = table(architecture, padded_vocab_size=vocabulary, head=form.head, mtp=mtp)
        self.pieces: dict[str, list[_Piece]] = {}
        for row in rows:
            for number, source in enumerate(row.sources):
                if self._has_tensor(row, source.name):
                    self.pieces.setdefault(source.name, []).append(_Piece(row, number))
        for name in self._tensors_outside_model(rows):  # which looks at the pieces so far
            self.pieces[name] = []

    @property
    def leaves_mtp_out(self) -> bool:
        """Whether it is a run's iteration, without MTP layers that the model has."""
        trained = isinstance(self.stored, MegatronCheckpoint) and isinstance(self._iteration, int)
        has = self.stored.has_mtp or not self.architecture.mtp_num_hidden_layers
        return trained and not has

    @property
    def maker(self) -> str | None:
        dialect = getattr(self.stored, "dialect", None)
        return None if dialect is None else dialect.maker

    def piece_dtype(self, piece: _Piece) -> torch.dtype:
        if isinstance(self.stored, MegatronCheckpoint):
            return self.stored.dtype(piece.row.key)
        return self.stored.entries[piece.source.name].dtype

    def dtype_of(self, name: str) -> torch.dtype:
        return self.piece_dtype(self.pieces[name][0])

    def nbytes(self, name: str) -> int:
        return sum(piece.numel * self.piece_dtype(piece).itemsize for piece in self.pieces[name])

    def read_box(self, row: Row, box: Box) -> Tensor:
        """Read a box of an mcore piece."""
        if isinstance(self.stored, MegatronCheckpoint):
            return self.stored.read_box(row, box)
        return row.take(self.stored.read_tensor, box)

    def read_tensor(self, name: str, expert: int | None = None) -> Tensor:
        """Return an HF tensor; of fused experts, (1, ...), that of `expert`."""
        if not isinstance(self.stored, MegatronCheckpoint):
            box = () if expert is None else (slice(expert, expert + 1),)
            return self.stored.read_tensor(name, box)
        wanted = [p for p in self.pieces[name] if p.source.index == expert]
        dtype = self.dtype_of(name)
        parts = [
            part.flatten()
            for piece in wanted
            for part in stream_hf(self.stored, piece.row, piece.number, dtype)
        ]
        shape = wanted[0].source.shape
        return torch.cat(parts).view(shape if expert is None else (1, *shape[1:]))

    def companion_digest(self, name: str) -> str:
        """Return a companion file's hash; that of a config leaves its quantisation settings out."""
        if name == "config.json" and getattr(self.stored, "quantization", None) is not None:
            config = quantized.without_quantization(read_config_file(self.companions[name]))
            return sha256(config_file.dumps(config)).hexdigest()
        return sha256_of(self.companions[name])

    def _has_tensor(self, row: Row, name: str) -> bool:
        """Return whether the tensor is there with the shape that the config gives it."""
        if isinstance(self.stored, MegatronCheckpoint):
            stored = self.stored.index.tensors.get(row.key)
            return stored is not None and stored.shape == row.global_shape
        entry = self.stored.entries.get(name)
        return entry is not None and entry.shape in {s.shape for s in row.sources if s.name == name}

    def _tensors_outside_model(self, rows: list[Row]) -> list[str]:
        """Return the tensors that the model described by the config does not have."""
        if isinstance(self.stored, MegatronCheckpoint):
            return sorted(self.stored.model_keys() - {row.key for row in rows})
        return [name for name in self.stored.entries if name not in self.pieces]


def _config_folder(path: Path) -> Path | None:
    """Return a checkpoint's folder of the config; None if it is Megatron's and has none."""
    place = identify(path)
    place.require_whole()
    return path if place.kind in (PathKind.HUGGINGFACE, PathKind.CONFIG) else place.hf


def _compare_tensor(name: str, left: Side, right: Side, rounded: bool) -> Finding:
    """Compare a tensor of both; another shape is a flaw, and another dtype unless `rounded`."""
    mine, theirs = left.pieces[name], right.pieces.get(name)
    if theirs is None:
        return Finding(TENSORS, name, flaw=ONLY_A)
    if not mine or not theirs:
        return Finding(TENSORS, name, flaw="not the shape that the config gives it")
    shapes = [[(p.numel, p.row.shape[1:]) for p in pieces] for pieces in (mine, theirs)]
    if shapes[0] != shapes[1]:  # rows are as many as Megatron's vocabulary is padded to
        return Finding(TENSORS, name, flaw="the two configs give it different shapes")
    pairs = {(left.piece_dtype(a), right.piece_dtype(b)) for a, b in zip(mine, theirs, strict=True)}
    for dtypes in pairs if not rounded else ():
        if dtypes[0] != dtypes[1]:
            return Finding(TENSORS, name, flaw=f"dtypes {' and '.join(map(dtype_name, dtypes))}")
    measured = Measurement()
    for a, b in zip(mine, theirs, strict=True):
        measured += _measure_piece(a, b, left, right)
    return Finding(TENSORS, name, measured, expected_count=sum(piece.numel for piece in mine))


def _measure_piece(a: _Piece, b: _Piece, left: Side, right: Side) -> Measurement:
    """Compare one piece, block by block."""
    columns = tuple(slice(0, n) for n in a.row.shape[1:])
    dtype = left.piece_dtype(a)
    step = max_rows(a.row, dtype)
    measured = Measurement()
    first = 0
    # The blocks of a row stand one after another; those of its other HF tensors are passed over.
    for block in a.row.rearrangement.blocks:
        last = first + block.stop - block.start
        for start in range(first, last, step) if block.source == a.number else ():
            box = (slice(start, min(start + step, last)), *columns)
            right_values = right.read_box(b.row, box).to(dtype)
            measured += measure(right_values, left.read_box(a.row, box), bitwise=True)
        first = last
    return measured


def _compare_files(left: Side, right: Side) -> Iterator[Finding]:
    a, b = left.companions, right.companions
    if not a or not b:  # a Megatron checkpoint that was written without them
        return
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            flaw = ONLY_A if name in a else ONLY_B
        else:
            flaw = "" if left.companion_digest(name) == right.companion_digest(name) else "differs"
        yield Finding(FILES, name, flaw=flaw)


def check_manifest(
    path: str | Path, *, workers: int | None = None, progress: Progress | None = None
) -> Report:
    """Compare the checksum of every HF tensor of an mcore checkpoint with its manifest.

    Args:
        path: a checkpoint that `hf_to_mcore` wrote; later iterations beside it are ignored.
        workers: threads; default two per core.

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
    place = identify(folder)
    architecture, form = Architecture.from_hf(place.config()), read_form(place.config())
    checkpoint = open_megatron(place, architecture)
    rows = table(
        architecture,
        expert_layout=made["expert_layout"],
        padded_vocab_size=checkpoint.vocab_size,
        head=form.head.in_megatron,
        mtp=checkpoint.has_mtp,
    )
    checkpoint.require(rows)
    stated: dict[str, dict[str, Any]] = rename_entries(made["tensors"], form.names)
    problems = dict(_misfits(rows, checkpoint, stated))
    sound = {name: tensor for name, tensor in stated.items() if name not in problems}
    pieces = [
        (_Piece(row, number), checksum)
        for row in rows
        for number, source in enumerate(row.sources)
        if (checksum := stated_checksum(sound, source)) is not None
    ]
    sizes = (piece.numel * checkpoint.dtype(piece.row.key).itemsize for piece, _ in pieces)
    meter = Meter(sum(sizes), progress)
    wrong: dict[str, list[SourceTensor]] = {}  # pieces by HF tensor
    lock = threading.Lock()

    def check_piece(piece_and_checksum: tuple[_Piece, str]) -> None:
        piece, checksum = piece_and_checksum
        dtype, source = checkpoint.dtype(piece.row.key), piece.source
        checksum_here = xxhash.xxh3_128()
        for chunk in stream_hf(checkpoint, piece.row, piece.number, dtype):
            checksum_here.update(as_bytes(chunk))
        if checksum_here.hexdigest() != checksum:
            with lock:
                wrong.setdefault(source.name, []).append(source)
        meter.add(piece.numel * dtype.itemsize, source.name)

    try:
        with ThreadPoolExecutor(workers or default_workers()) as pool:
            list(pool.map(check_piece, pieces))  # raises what a thread raised
    except OSError as error:
        raise BadInput(f"{folder} cannot be read: {error}. Copy the checkpoint again.") from error
    problems |= {name: _describe_wrong_pieces(pieces) for name, pieces in wrong.items()}
    names = dict.fromkeys([*hf_shapes(rows), *stated])
    findings = [Finding(TENSORS, name, flaw=problems.get(name, "")) for name in names]
    return Report(f"{folder} and {file}", findings=findings)


def _misfits(
    rows: list[Row], checkpoint: MegatronCheckpoint, stated: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield the tensors that differ from the manifest without reading their bytes, and how."""
    shapes = hf_shapes(rows)
    sources = [(row, source) for row in rows for source in row.sources]
    dtypes = {source.name: dtype_name(checkpoint.dtype(row.key)) for row, source in sources}
    pieces: dict[str, list[Any]] = {}
    for _, source in sources:
        pieces.setdefault(source.name, []).append(source.piece)
    for name, shape in shapes.items():
        if name not in stated:
            yield name, "is not in the manifest"
        elif tuple(stated[name]["shape"]) != shape:
            yield name, f"has shape {list(shape)}; the manifest says {stated[name]['shape']}"
        elif stated[name]["dtype"] != dtypes[name]:
            yield name, f"has dtype {dtypes[name]}; the manifest says {stated[name]['dtype']}"
        elif manifest.pieces_of(stated[name]) != pieces[name]:
            yield name, "has a manifest entry of another form: each of its pieces has a checksum"
    for name in stated:
        if name not in shapes:
            yield name, "is in the manifest, but not in the checkpoint"


def _describe_wrong_pieces(wrong: list[SourceTensor]) -> str:
    """Return the flaw of an HF tensor whose given pieces have other bytes than stated."""
    experts = sorted(source.index for source in wrong if source.index is not None)
    if not experts:
        parts = "".join(sorted(source.piece_words for source in wrong))
        return f"has other bytes than the manifest's checksum{parts}"
    listed = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
    return f"has other bytes than the manifest's checksums in experts {listed} ({len(experts)})"


CUT = Layout(tp=2, sp=True)
"""A layout that splits each tensor split by any layout, along the same axis."""

Phase = Callable[[str], AbstractContextManager[Progress]]
"""``with phase(title) as progress:`` shows one phase of the work."""


def roundtrip(
    src: str | Path,
    work_dir: Path | None,
    phase: Phase,
    *,
    workers: int | None = None,
    strict: bool = False,
) -> Report:
    """Convert `src` both ways in a temporary directory and compare every tensor and companion file.

    Args:
        work_dir: folder for the temporary directory, with room for twice the checkpoint; None: the
            system's temporary directory.
        phase, workers, strict: see `Phase` and `convert.hf_to_mcore`.

    Raises:
        BadInput, CheckFailed: see `convert.hf_to_mcore`; what was converted is not kept.
    """
    with scratch_folder("roundtrip-", work_dir) as folder:
        mcore, back = folder / "mcore", folder / "hf"
        try:
            with phase("to Megatron-Core") as progress:
                forward = hf_to_mcore(src, mcore, workers=workers, progress=progress, strict=strict)
            with phase("back to Hugging Face") as progress:
                returned = mcore_to_hf(mcore, back, workers=workers, progress=progress)
        except Interrupted as error:  # its message says that the parts are kept, and here they go
            raise BadInput(
                f"The round trip of {src} stopped: {error.__cause__}. It needs room for twice the "
                f"checkpoint in {folder.parent}, or in another folder: --work-dir DIR. Nothing is "
                "kept."
            ) from error
        with phase("comparing") as progress:
            report = compare_checkpoints(src, back, progress=progress)
    report.title = f"{src} to Megatron-Core and back"
    report.environment |= {"there": _describe_result(forward), "back": _describe_result(returned)}
    if forward.notes:
        report.environment["notes"] = " ".join(forward.notes)
    return report


def _describe_result(result: ConversionResult) -> str:
    return f"{result.tensors_in_words}, {result.nbytes:,} bytes in {result.seconds:.1f} s"


def adapter_roundtrip(
    hf: str | Path,
    lora: str | Path,
    work_dir: Path | None = None,
    layout: Layout | None = None,
    timeout: float = 3600.0,
) -> Report:
    """Put an adapter into a model of random weights under a layout, write it, and compare.

    The model is built on the CPU in the adapter's dtype, so its memory is needed; its weights are
    not read. The head's base weight, which PEFT stores beside its factors, is left out.

    Args:
        hf: Hugging Face directory whose config describes the model.
        work_dir: directory for the temporary copy; None: the system's temporary directory.
        layout: parallel sizes; default `CUT`.

    Raises:
        BadInput: the adapter or the config cannot be used.
    """
    cpu.install()
    layout = layout or CUT
    adapter = read_adapter(lora, hf)
    architecture = Architecture.from_hf(hf)
    layout.validate(architecture)
    from mcore_qwen3vl.model.lora import whole_tensors

    with scratch_folder("roundtrip-", work_dir) as folder:
        back = folder / "adapter"
        run_layout(
            _write_adapter_of_model, layout.world_size, hf, layout, adapter, back, timeout=timeout
        )
        returned = read_adapter(back, hf)
        report = Report(f"{lora} into {layout} and back", {"layout": str(layout)})
        there, here = ({**a.factor_tensors(), **whole_tensors(a)} for a in (adapter, returned))
        for name, tensor in there.items():
            finding = Finding(TENSORS, name, flaw="is missing after the round trip")
            if name in here:
                measurement = measure(here[name], tensor, bitwise=True)
                finding = Finding(TENSORS, name, measurement, expected_count=tensor.numel())
            report.findings.append(finding)
        kept = _sorted_fields(adapter) == _sorted_fields(returned)
        report.findings.append(Finding("config", "fields", flaw="" if kept else "they differ"))
    return report


def _write_adapter_of_model(hf: Path, layout: Layout, adapter: Adapter, back: Path) -> None:
    """Build the model, adapt it and save the adapter; every rank calls this."""
    from mcore_qwen3vl.converters.export import save_adapter
    from mcore_qwen3vl.model.lora import adapt
    from mcore_qwen3vl.model.qwen3vl import build_chunks
    from mcore_qwen3vl.runtime.launch import initialize

    initialize(layout)
    dtype = next(iter(adapter.factors.values())).a.dtype
    with torch.device("cpu"):
        chunks = build_chunks(
            Architecture.from_hf(hf), layout, params_dtype=dtype, perform_initialization=False
        )
    adapt(chunks, adapter)
    save_adapter(chunks, back, config=adapter.config, hf_config=hf)


def _sorted_fields(adapter: Adapter) -> dict[str, Any]:
    """Return a config with its names sorted, because PEFT writes them in random order."""
    return {
        name: sorted(value) if isinstance(value, list) else value
        for name, value in adapter.config.to_dict().items()
    }
