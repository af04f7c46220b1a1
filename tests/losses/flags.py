"""Settings of a run from the flags of a loss, and flags that many tests use."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3vl.losses.loss import Loss
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.arguments.settings import Settings

RANK_4 = ("--lora-rank", "4")
WHOLE = "--lora-modules-to-save"
KTO = ("--loss", "kto", *RANK_4, "--packing")
MODEL = ("--loss", "dpo", "--reference", "model")
DISTILL = ("--loss", "distill")
BY_JSD = ("--distill-divergence", "jsd")
TASK = ("--task", "embedding")


def parsed(checkpoint: Path, *flags: str) -> Settings:
    common = ("--cpu", "--hf-model", str(checkpoint), "--data-path", "x.jsonl")
    return validate([*common, "--train-iters", "1", *flags], 1).settings


def loss_of[Kind: Loss](checkpoint: Path, kind: type[Kind], *flags: str) -> Kind:
    loss = parsed(checkpoint, *flags).loss
    assert isinstance(loss, kind)
    return loss
