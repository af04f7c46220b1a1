"""The C compiler that Triton needs for every kernel that it compiles."""

from __future__ import annotations

import os
import shutil


def c_compiler() -> str | None:
    """Return the C compiler that Triton would use; None: there is none."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def compile_where_possible() -> None:
    """Disable ``torch.compile``, which Megatron uses for fusions, where there is no compiler.

    Fused functions then run one kernel after another. Otherwise the warm-up before training would
    fail.
    """
    if c_compiler() is None:
        import torch

        config: object = torch._dynamo.config
        config.disable = True  # type: ignore[attr-defined]
