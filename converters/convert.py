"""Convert checkpoints between Hugging Face and Megatron-Core, without a GPU and in little memory.

The `plan_*` functions check all that can be checked without moving data and report what would be
done; `write` then carries out that plan, and `write_part` one part of it. All are in `offline`; the
commands and other programs import them from here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Unpack

from mcore_qwen3vl.converters.offline.engine import (
    ConversionPlan,
    ConversionResult,
    PartResult,
    plan_and_write,
    write,
    write_part,
)
from mcore_qwen3vl.converters.offline.to_hf import HFOptions, plan_hf_to_hf, plan_mcore_to_hf
from mcore_qwen3vl.converters.offline.to_mcore import McoreOptions, plan_hf_to_mcore

__all__ = [
    "ConversionPlan",
    "ConversionResult",
    "HFOptions",
    "McoreOptions",
    "PartResult",
    "hf_to_hf",
    "hf_to_mcore",
    "mcore_to_hf",
    "plan_hf_to_hf",
    "plan_hf_to_mcore",
    "plan_mcore_to_hf",
    "write",
    "write_part",
]


def hf_to_mcore(
    src: str | Path, dst: str | Path, **options: Unpack[McoreOptions]
) -> ConversionResult:
    """Write a checkpoint that Megatron loads.

    `plan_hf_to_mcore` and `write` describe the arguments and the errors.
    """
    return plan_and_write(plan_hf_to_mcore, src, dst, dict(options))


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
    return plan_and_write(partial(plan_mcore_to_hf, hf_config=hf_config), src, dst, dict(options))


def hf_to_hf(
    src: str | Path, dst: str | Path, *, vocab_size: int | None = None, **options: Unpack[HFOptions]
) -> ConversionResult:
    """Write a Hugging Face checkpoint of the same model; see `plan_hf_to_hf` and `write`."""
    return plan_and_write(partial(plan_hf_to_hf, vocab_size=vocab_size), src, dst, dict(options))
