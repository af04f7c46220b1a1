"""Training on this machine: ``mcore-qwen3vl train`` forwards to torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from mcore_qwen3vl.training.arguments import is_cpu


def torchrun_command(flags: Sequence[str], processes: int) -> list[str]:
    """The command that trains with `flags` on `processes` ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(processes), "-m", "mcore_qwen3vl.training", *flags]


def default_processes(flags: Sequence[str]) -> int:
    """One rank a GPU, or one on the CPU."""
    import torch

    return 1 if is_cpu(flags) else max(torch.cuda.device_count(), 1)


def train_locally(flags: Sequence[str], processes: int | None = None) -> int:
    """Train on this machine and return torchrun's exit code.

    Args:
        flags: those of :mod:`mcore_qwen3vl.training.arguments` and Megatron's.
        processes: ranks; default: :func:`default_processes`.
    """
    command = torchrun_command(flags, processes or default_processes(flags))
    # As many threads a rank as torchrun would set, without its warning.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(command, env=environment, check=False).returncode
