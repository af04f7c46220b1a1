"""Convert checkpoints between Hugging Face and Megatron-Core, without a GPU and in little memory.

`plan_*` checks everything that can be checked without moving data and says what would be done;
the conversion itself then runs the plan's units on a few threads (the work is reading, writing and
copying memory, during which Python's lock is free).
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from mcore_qwen3vl.converters.legacy import to_legacy
from mcore_qwen3vl.converters.legacy.layout import Legacy
from mcore_qwen3vl.converters.offline import to_hf, to_mcore
from mcore_qwen3vl.converters.offline.plan import Plan, Summary, Unit, default_workers
from mcore_qwen3vl.converters.offline.to_hf import LayoutChoice
from mcore_qwen3vl.converters.storage.progress import Meter, Progress
from mcore_qwen3vl.converters.storage.staging import Staging, check_target, staging
from mcore_qwen3vl.errors import BadInput


def plan_hf_to_mcore(
    src: str | Path,
    *,
    dtype: str = "keep",
    make_vocab_size_divisible_by: int = 1,
    tp: int = 1,
    legacy: Legacy | None = None,
) -> Plan:
    """Check a Hugging Face checkpoint and say how it would be converted; writes nothing.

    Args:
        src: checkpoint directory.
        dtype: "keep", "bf16", "fp16" or "fp32".
        make_vocab_size_divisible_by, tp: pad the vocabulary as Megatron does for these flags.
        legacy: write Megatron's legacy format (``--ckpt-format torch``) for this layout, whose TP
            then decides the padding; None: ``torch_dist``.

    Raises:
        BadInput: anything about the input or the options that cannot be converted exactly.
    """
    options = {"dtype": dtype, "make_vocab_size_divisible_by": make_vocab_size_divisible_by}
    if legacy is not None:
        return to_legacy.plan(_directory(src), legacy, **options)
    return to_mcore.plan(_directory(src), **options, tp=tp)


def hf_to_mcore(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str = "keep",
    make_vocab_size_divisible_by: int = 1,
    tp: int = 1,
    legacy: Legacy | None = None,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write a checkpoint that Megatron loads: under any layout, or a legacy one under its own.

    Args:
        src, dtype, make_vocab_size_divisible_by, tp, legacy: see `plan_hf_to_mcore`.
        dst: directory to write; it appears complete or not at all.
        force: replace `dst` if it is a checkpoint.
        workers: threads; default two per core, at most `plan.MOST_WORKERS`.
        progress: called with bytes done, bytes in all and the tensor at hand.

    Raises:
        BadInput: see `plan_hf_to_mcore`; or `dst` exists; or reading or writing failed, in which
            case running again continues where this run stopped.
    """
    check_target(Path(dst), force=force)
    plan = plan_hf_to_mcore(
        src,
        dtype=dtype,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        tp=tp,
        legacy=legacy,
    )
    return execute(plan, Path(dst), force=force, workers=workers, progress=progress)


def plan_mcore_to_hf(
    src: str | Path,
    *,
    hf_config: str | Path | None = None,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    expert_layout: LayoutChoice = "source",
) -> Plan:
    """Check a Megatron-Core checkpoint and say how it would be exported; writes nothing.

    Args:
        src: checkpoint directory, or the folder of one iteration.
        hf_config: directory with the HF config and tokenizer; default ``src/hf``.
        dtype: "keep", "bf16", "fp16" or "fp32".
        max_shard_size: largest safetensors file, like "5GB".
        expert_layout: "source" keeps layout and config as the checkpoint came; "published" and
            "v5" convert both, for transformers 4.57 and 5.

    Raises:
        BadInput: anything about the input or the options that cannot be converted exactly.
    """
    return to_hf.plan(
        _directory(src),
        hf_config_dir=None if hf_config is None else _directory(hf_config),
        dtype=dtype,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
    )


def mcore_to_hf(
    src: str | Path,
    dst: str | Path,
    *,
    hf_config: str | Path | None = None,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    expert_layout: LayoutChoice = "source",
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write a Hugging Face checkpoint; see `plan_mcore_to_hf` and `hf_to_mcore`."""
    check_target(Path(dst), force=force)
    plan = plan_mcore_to_hf(
        src,
        hf_config=hf_config,
        dtype=dtype,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
    )
    return execute(plan, Path(dst), force=force, workers=workers, progress=progress)


def execute(
    plan: Plan,
    dst: Path,
    *,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Run a plan. `dst` appears by rename when everything is durably written.

    Raises:
        BadInput: see `hf_to_mcore`.
    """
    started = time.monotonic()
    _keep_apart(plan, dst)
    try:
        with staging(dst, plan.fingerprint, force=force) as stage:
            resumed = _run_units(plan, stage, workers or default_workers(), progress)
            plan.conversion.finish(stage.tree, {u.name: stage.done[u.name] for u in plan.units})
            stage.publish()
    except OSError as error:
        raise BadInput(
            f"the conversion of {plan.source} stopped: {error}. {dst} was not touched; what is "
            "finished is kept beside it, and running the same command again continues from there."
        ) from error
    return Summary(
        direction=plan.direction,
        source=plan.source,
        target=str(dst),
        tensors=plan.tensors,
        nbytes=plan.nbytes,
        files=plan.files,
        sidecars=tuple(plan.sidecars),
        dtypes=plan.dtypes,
        expert_layout=plan.expert_layout,
        resumed_units=resumed,
        seconds=time.monotonic() - started,
        notes=plan.notes,
    )


def _run_units(plan: Plan, stage: Staging, workers: int, progress: Progress | None) -> int:
    """Do what the journal does not have yet; returns how many units it had."""
    kept = {
        unit.name
        for unit in plan.units
        if unit.name in stage.done
        and plan.conversion.is_done(unit, stage.tree, stage.done[unit.name])
    }
    plan.conversion.prepare(stage.tree)
    meter = Meter(plan.nbytes, progress)
    meter.add(sum(unit.nbytes for unit in plan.units if unit.name in kept), "resumed")
    stop = threading.Event()

    def moved(nbytes: int, name: str) -> None:
        meter.add(nbytes, name)
        if stop.is_set():
            raise _Stopped

    def work(unit: Unit) -> None:
        if stop.is_set():
            return
        result = plan.conversion.run(unit, stage.tree, moved)
        stage.finish(unit.name, result)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, unit) for unit in plan.units if unit.name not in kept]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()  # after an error or an interrupt, the other workers stop at the next tensor
    errors = [error for future in done if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, _Stopped)):
        raise error
    return len(kept)


class _Stopped(Exception):
    """Another worker failed."""


def _directory(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_dir():
        raise BadInput(f"{path} is not a directory. Check the path.")
    return path


def _keep_apart(plan: Plan, dst: Path) -> None:
    """Refuse a target inside its source or around it, which --force would delete."""
    source, target = Path(plan.source).resolve(), dst.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise BadInput(
            f"{dst} and {plan.source} lie one inside the other. Write to a directory apart from "
            "the source."
        )
