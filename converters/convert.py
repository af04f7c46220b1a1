"""Convert checkpoints between Hugging Face and Megatron-Core, without a GPU and in little memory.

The `plan_*` functions check all that can be checked without moving data and report what would be
done; the conversion then carries out that plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mcore_qwen3vl.converters.mapping import dialects
from mcore_qwen3vl.converters.mcore import formats
from mcore_qwen3vl.converters.offline import hf_to_hf as hf_copy
from mcore_qwen3vl.converters.offline import to_hf, to_mcore
from mcore_qwen3vl.converters.offline.engine import ConversionResult, execute
from mcore_qwen3vl.converters.offline.plan import ConversionPlan
from mcore_qwen3vl.converters.offline.to_hf import LayoutChoice
from mcore_qwen3vl.converters.storage.progress import Progress
from mcore_qwen3vl.converters.storage.staging import check_target
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout


def plan_hf_to_mcore(
    src: str | Path,
    *,
    dtype: str = "keep",
    make_vocab_size_divisible_by: int = 1,
    tp: int = 1,
    format: str = formats.DEFAULT,
    layout: Layout | None = None,
    spec: str | None = None,
    dialect: str | None = None,
) -> ConversionPlan:
    """Check a Hugging Face checkpoint and plan its conversion; write nothing.

    Args:
        src: checkpoint directory.
        dtype: "keep", "bf16", "fp16" or "fp32".
        make_vocab_size_divisible_by, tp: the vocabulary is padded as Megatron pads it for these
            flags.
        format: the value of Megatron's ``--ckpt-format``: "torch_dist" loads under any layout,
            "torch" (legacy) under one only.
        layout: the parallel sizes, for a format that is written for one layout. Its TP replaces
            `tp` in the padding; CP, DP and SP do not matter. Default: one rank.
        spec: the layer spec whose parameter names are written, for a format that is written for
            one layout: "te" (the default) or "torch".
        dialect: the project whose keys are written: "megatron-bridge" or "ms-swift"; default: this
            project's own.

    Raises:
        BadInput: the input cannot be converted exactly with these options.
    """
    formats.require_huggingface(Path(src))
    per_layout = formats.named(format).per_layout
    wanted = None if dialect is None else dialects.named(dialect)
    if per_layout is not None and wanted is not None:
        raise BadInput(f"--dialect {dialect} is written in the {formats.DEFAULT} format only.")
    if per_layout is not None:
        return per_layout.plan(
            _directory(src),
            layout or Layout(),
            spec or "te",
            dtype=dtype,
            make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        )
    if layout is not None or spec is not None:
        raise BadInput(
            f"{format} loads under any layout and layer spec: leave layout and spec out, or choose "
            "a format that is written for one layout."
        )
    return to_mcore.plan(
        _directory(src),
        dtype=dtype,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        tp=tp,
        dialect=wanted,
    )


def write(
    plan: Callable[[], ConversionPlan],
    dst: str | Path,
    *,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    strict: bool = False,
) -> ConversionResult:
    """Check that `dst` may be written, make the plan and carry it out.

    Args:
        plan: returns the plan; see the `plan_*` functions.
        dst, force, workers, progress, strict: see `hf_to_mcore`.

    Raises:
        BadInput: `plan` raised it, `dst` exists, or reading or writing failed.
    """
    check_target(Path(dst), force=force, replaceable=formats.is_checkpoint)
    return execute(
        plan(), Path(dst), force=force, workers=workers, progress=progress, strict=strict
    )


def hf_to_mcore(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str = "keep",
    make_vocab_size_divisible_by: int = 1,
    tp: int = 1,
    format: str = formats.DEFAULT,
    layout: Layout | None = None,
    spec: str | None = None,
    dialect: str | None = None,
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    strict: bool = False,
) -> ConversionResult:
    """Write a checkpoint that Megatron loads.

    Args:
        src, dtype, make_vocab_size_divisible_by, tp, format, layout, spec, dialect: see
            `plan_hf_to_mcore`.
        dst: directory to write; it appears complete or not at all.
        force: replace `dst` if it is a checkpoint.
        workers: number of threads; default: two per core, at most `engine.MOST_WORKERS`.
        progress: called with the bytes done, the bytes in all and the name of the current tensor.
        strict: write nothing if a value is NaN or infinite. Otherwise the result's notes say so.

    Raises:
        BadInput: `plan_hf_to_mcore` raised it; `dst` exists; or reading or writing failed, in which
            case running again continues where this run stopped.
        CheckFailed: a value is NaN or infinite and `strict` is set; the message names the tensors.
    """
    plan = partial(
        plan_hf_to_mcore,
        src,
        dtype=dtype,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        tp=tp,
        format=format,
        layout=layout,
        spec=spec,
        dialect=dialect,
    )
    return write(plan, dst, force=force, workers=workers, progress=progress, strict=strict)


def plan_mcore_to_hf(
    src: str | Path,
    *,
    hf_config: str | Path | None = None,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    expert_layout: LayoutChoice = "source",
) -> ConversionPlan:
    """Check a Megatron-Core checkpoint and plan its export; write nothing.

    Args:
        src: checkpoint directory, or the folder of one iteration.
        hf_config: directory with the HF config and tokenizer; default: ``src/hf``.
        dtype: "keep", "bf16", "fp16" or "fp32".
        max_shard_size: largest safetensors file, like "5GB".
        expert_layout: "source" keeps the layout of the experts and the config; "published" and
            "v5" convert both, for transformers 4.57 and 5.

    Raises:
        BadInput: the input cannot be converted exactly with these options.
    """
    formats.require_megatron(Path(src))
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
    strict: bool = False,
) -> ConversionResult:
    """Convert a Megatron checkpoint to Hugging Face's format.

    `plan_mcore_to_hf` describes the arguments of the plan, and `hf_to_mcore` those of the writing.
    """
    plan = partial(
        plan_mcore_to_hf,
        src,
        hf_config=hf_config,
        dtype=dtype,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
    )
    return write(plan, dst, force=force, workers=workers, progress=progress, strict=strict)


def plan_hf_to_hf(
    src: str | Path,
    *,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    expert_layout: LayoutChoice = "source",
) -> ConversionPlan:
    """Check a Hugging Face checkpoint and plan how to rewrite it; write nothing.

    Args:
        src: checkpoint directory.
        dtype, max_shard_size, expert_layout: see `plan_mcore_to_hf`.

    Raises:
        BadInput: the input cannot be converted exactly with these options.
    """
    formats.require_huggingface(Path(src))
    return hf_copy.plan(
        _directory(src), dtype=dtype, max_shard_size=max_shard_size, expert_layout=expert_layout
    )


def hf_to_hf(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str = "keep",
    max_shard_size: str = "5GB",
    expert_layout: LayoutChoice = "source",
    force: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    strict: bool = False,
) -> ConversionResult:
    """Write a Hugging Face checkpoint of the same model; see `plan_hf_to_hf` and `hf_to_mcore`."""
    plan = partial(
        plan_hf_to_hf,
        src,
        dtype=dtype,
        max_shard_size=max_shard_size,
        expert_layout=expert_layout,
    )
    return write(plan, dst, force=force, workers=workers, progress=progress, strict=strict)


def _directory(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_dir():
        raise BadInput(f"{path} is not a directory. Check the path.")
    return path
