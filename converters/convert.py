"""Convert checkpoints between Hugging Face and Megatron-Core, without a GPU and in little memory.

The `plan_*` functions check all that can be checked without moving data and report what would be
done; `write` then carries out that plan.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Unpack

from mcore_qwen3vl.converters.mapping import dialects
from mcore_qwen3vl.converters.megatron_checkpoint import format_named
from mcore_qwen3vl.converters.offline import to_mcore
from mcore_qwen3vl.converters.offline.engine import (
    ConversionPlan,
    ConversionResult,
    Writing,
    convert,
    write,
)
from mcore_qwen3vl.converters.offline.to_hf import HFOptions, plan_hf_to_hf, plan_mcore_to_hf
from mcore_qwen3vl.converters.place import DEFAULT_FORMAT, identify
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout

__all__ = [
    "hf_to_hf",
    "hf_to_mcore",
    "mcore_to_hf",
    "plan_hf_to_hf",
    "plan_hf_to_mcore",
    "plan_mcore_to_hf",
    "write",
]


class McoreOptions(Writing, total=False):
    """The options of `plan_hf_to_mcore` and of `write`."""

    dtype: str
    make_vocab_size_divisible_by: int
    tp: int
    format: str
    layout: Layout | None
    spec: str | None
    dialect: str | None


def plan_hf_to_mcore(
    src: str | Path,
    *,
    dtype: str = "keep",
    make_vocab_size_divisible_by: int = 1,
    tp: int = 1,
    format: str = DEFAULT_FORMAT,
    layout: Layout | None = None,
    spec: str | None = None,
    dialect: str | None = None,
) -> ConversionPlan:
    """Check a Hugging Face checkpoint and plan its conversion; write nothing.

    Args:
        dtype: "keep", "bf16", "fp16" or "fp32".
        make_vocab_size_divisible_by, tp: the vocabulary is padded as Megatron pads it for these
            flags.
        format: the value of Megatron's ``--ckpt-format``: "torch_dist" loads under any layout,
            "torch" (legacy) under one only.
        layout: the parallel sizes, for a format that is written for one layout. Its TP replaces
            `tp` in the padding; CP, DP and SP do not matter. Default: one rank.
        spec: the layer spec whose parameter names are written, for a format that is written for
            one layout: "te" (the default) or "torch".
        dialect: the project whose keys are written, "megatron-bridge" or "ms-swift"; or "hybrid",
            for those of Megatron-Core's ``HybridModel``. Default: this project's own.

    Raises:
        BadInput: the input cannot be converted exactly with these options.
    """
    source = identify(src)
    source.require_huggingface()
    plan_per_layout = format_named(format).plan
    wanted = None if dialect is None else dialects.dialect_named(dialect)
    common: Any = {"dtype": dtype, "make_vocab_size_divisible_by": make_vocab_size_divisible_by}
    if plan_per_layout is not None:
        if wanted is not None:
            raise BadInput(f"--dialect {dialect} is written in the {DEFAULT_FORMAT} format only.")
        return plan_per_layout(source.path, layout or Layout(), spec or "te", **common)
    if layout is not None or spec is not None:
        raise BadInput(
            f"{format} loads under any layout and layer spec: leave layout and spec out, or choose "
            "a format that is written for one layout."
        )
    return to_mcore.plan(source.path, **common, tp=tp, dialect=wanted)


def hf_to_mcore(
    src: str | Path, dst: str | Path, **options: Unpack[McoreOptions]
) -> ConversionResult:
    """Write a checkpoint that Megatron loads.

    `plan_hf_to_mcore` and `write` describe the arguments and the errors.
    """
    return convert(plan_hf_to_mcore, src, dst, dict(options))


def mcore_to_hf(
    src: str | Path,
    dst: str | Path,
    *,
    hf_config: str | Path | None = None,
    **options: Unpack[HFOptions],
) -> ConversionResult:
    """Convert a Megatron checkpoint to Hugging Face's format.

    `plan_mcore_to_hf` and `write` describe the arguments and the errors.
    """
    return convert(partial(plan_mcore_to_hf, hf_config=hf_config), src, dst, dict(options))


def hf_to_hf(
    src: str | Path, dst: str | Path, *, vocab_size: int | None = None, **options: Unpack[HFOptions]
) -> ConversionResult:
    """Write a Hugging Face checkpoint of the same model; see `plan_hf_to_hf` and `write`."""
    return convert(partial(plan_hf_to_hf, vocab_size=vocab_size), src, dst, dict(options))
