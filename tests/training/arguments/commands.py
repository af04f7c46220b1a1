"""Command lines of a run, parsed for a checkpoint."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3vl.training.arguments.parser import Parsed, validate

BASE = (
    *("--cpu", "--seq-length", "128", "--micro-batch-size", "1"),
    *("--train-iters", "3", "--lr", "1"),
)
TP2 = ("--tensor-model-parallel-size", "2")
FIRST = ("--moe-expert-capacity-factor", "1", "--moe-token-drop-policy", "position")


def parsed(model: Path, *flags: str, world_size: int = 1) -> Parsed:
    return validate(["--hf-model", str(model), *BASE, *flags], world_size)
