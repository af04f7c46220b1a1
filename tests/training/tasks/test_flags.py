"""Flags of embedding training that go together, and those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.settings import Contrastive
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.arguments.settings import Settings

TASK = ("--task", "embedding")


def parsed(checkpoint: Path, *flags: str) -> Settings:
    common = ("--cpu", "--hf-model", str(checkpoint), "--data-path", "x.jsonl")
    return validate([*common, "--train-iters", "1", *flags], 1).settings


def test_values_and_defaults(moe: Path) -> None:
    found = parsed(moe, *TASK, "--temperature", "0.2", "--matryoshka-dims", "8", "16")
    assert found.task.contrastive == Contrastive(0.2, (8, 16))
    assert found.compute.moe_aux_loss_coeff == 0
    assert parsed(moe, *TASK).task.contrastive == Contrastive(0.05)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--temperature", "0.2"), "--temperature is set without --task embedding"),
        ((*TASK, "--temperature", "0"), "temperature is 0"),
        ((*TASK, "--answers", "a", "b"), "--answers is set without --task reranker"),
        (("--task", "reranker", "--temperature", "2"), "--temperature is set without --task emb"),
        (("--task", "reranker", "--loss", "dpo"), "--loss dpo with --task reranker"),
        (
            ("--task", "reranker", "--lora-rank", "4", "--lora-target", "q_proj", "lm_head"),
            "factors on lm_head.* with --task reranker",
        ),
        (
            ("--task", "reward", "--lora-rank", "4", "--lora-modules-to-save", "lm_head"),
            "--task reward, whose model has no lm_head",
        ),
        (("--task", "reward", "--pretrained-checkpoint", "x"), "starts from Hugging Face weights"),
        ((*TASK, "--matryoshka-dims", "4096"), "the model's embeddings have 48 values"),
        ((*TASK, "--loss", "dpo"), "--loss dpo with --task embedding"),
        ((*TASK, "--overlong", "truncate"), "--overlong truncate with --task embedding"),
        ((*TASK, "--moe-z-loss-coeff", "0.01"), "with --task embedding: Megatron adds"),
        (
            (*TASK, "--lora-rank", "4", "--lora-modules-to-save", "lm_head"),
            "has no lm_head: leave it out",
        ),
    ],
)
def test_what_is_refused(flags: tuple[str, ...], message: str, moe: Path) -> None:
    with pytest.raises(BadInput, match=message):
        parsed(moe, *flags)


def test_dropout_is_refused(dense: Path) -> None:
    with pytest.raises(BadInput, match=r"lora_dropout is 0\.1 with --task embedding"):
        parsed(dense, *TASK, "--lora-rank", "4", "--lora-dropout", "0.1")
