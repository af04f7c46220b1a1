"""The C compiler that Triton wants for every kernel which it makes."""

from __future__ import annotations

import os
import shutil


def c_compiler() -> str | None:
    """The one that Triton would take; None: there is none."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def compile_where_possible() -> None:
    """Let ``torch.compile``, with which Megatron fuses, do nothing where there is no compiler.

    Its functions then run one kernel after another, where the warm-up before training would fail.
    """
    if c_compiler() is None:
        import torch

        config: object = torch._dynamo.config
        config.disable = True  # type: ignore[attr-defined]
