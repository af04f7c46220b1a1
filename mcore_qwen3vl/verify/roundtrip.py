"""Round trips, compared bit for bit: of a checkpoint, and of a PEFT adapter.

A checkpoint goes to Megatron-Core and back, an adapter through a sharded model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Adapter, read_adapter
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.offline.engine import ConversionResult, Interrupted
from mcore_qwen3vl.converters.storage.staging import Progress
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.verify.checkpoints import TENSORS, compare_checkpoints
from mcore_qwen3vl.verify.measurement import Finding, measure
from mcore_qwen3vl.verify.report import Report

CUT = Layout(tp=2, sp=True)
"""A layout that splits every tensor that any layout splits, along the same axis."""

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
    report.environment |= {"there": _outcome(forward), "back": _outcome(returned)}
    if forward.notes:
        report.environment["notes"] = " ".join(forward.notes)
    return report


def _outcome(result: ConversionResult) -> str:
    return f"{result.counted}, {result.nbytes:,} bytes in {result.seconds:.1f} s"


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
    from mcore_qwen3vl.model.lora.attach import whole_tensors

    with scratch_folder("roundtrip-", work_dir) as folder:
        back = folder / "adapter"
        run_layout(_through, layout.world_size, hf, layout, adapter, back, timeout=timeout)
        returned = read_adapter(back, hf)
        report = Report(f"{lora} into {layout} and back", {"layout": str(layout)})
        there, here = ({**a.tensors(), **whole_tensors(a)} for a in (adapter, returned))
        for name, tensor in there.items():
            finding = Finding(TENSORS, name, flaw="is missing after the round trip")
            if name in here:
                measurement = measure(here[name], tensor, bitwise=True)
                finding = Finding(TENSORS, name, measurement, expected_count=tensor.numel())
            report.findings.append(finding)
        kept = _meaning(adapter) == _meaning(returned)
        report.findings.append(Finding("config", "fields", flaw="" if kept else "they differ"))
    return report


def _through(hf: Path, layout: Layout, adapter: Adapter, back: Path) -> None:
    """Build the model, adapt it and save the adapter; every rank calls this."""
    from mcore_qwen3vl.converters.live.export import save_adapter
    from mcore_qwen3vl.model.lora.attach import adapt
    from mcore_qwen3vl.model.qwen3vl import build_chunks
    from mcore_qwen3vl.runtime.parallel import initialize

    initialize(layout)
    dtype = next(iter(adapter.factors.values())).a.dtype
    with torch.device("cpu"):
        chunks = build_chunks(
            Architecture.from_hf(hf), layout, params_dtype=dtype, perform_initialization=False
        )
    adapt(chunks, adapter)
    save_adapter(chunks, back, config=adapter.config, hf_config=hf)


def _meaning(adapter: Adapter) -> dict[str, Any]:
    """Return a config with its names sorted, because PEFT writes them in random order."""
    return {
        name: sorted(value) if isinstance(value, list) else value
        for name, value in adapter.config.to_dict().items()
    }
