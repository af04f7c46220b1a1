"""The round trip Hugging Face -> Megatron-Core -> Hugging Face, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.offline.engine import ConversionResult
from mcore_qwen3vl.converters.storage.progress import Progress
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.verify.checkpoints.bitwise import compare_checkpoints
from mcore_qwen3vl.verify.report.result import Report

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
        src: Hugging Face checkpoint directory.
        work_dir: folder for the temporary directory, with room for twice the checkpoint; None: the
            system's temporary directory.
        phase: see `Phase`.
        workers, strict: see `convert.hf_to_mcore`.

    Raises:
        BadInput, CheckFailed: see `convert.hf_to_mcore`.
    """
    with scratch_folder("roundtrip-", work_dir) as folder:
        mcore, back = folder / "mcore", folder / "hf"
        with phase("to Megatron-Core") as progress:
            forward = hf_to_mcore(src, mcore, workers=workers, progress=progress, strict=strict)
        with phase("back to Hugging Face") as progress:
            returned = mcore_to_hf(mcore, back, workers=workers, progress=progress)
        with phase("comparing") as progress:
            report = compare_checkpoints(src, back, progress=progress)
    report.title = f"{src} to Megatron-Core and back"
    report.environment |= {"there": _outcome(forward), "back": _outcome(returned)}
    if forward.notes:
        report.environment["notes"] = " ".join(forward.notes)
    return report


def _outcome(result: ConversionResult) -> str:
    return f"{result.counted}, {result.nbytes:,} bytes in {result.seconds:.1f} s"
