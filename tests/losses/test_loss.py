"""Flags and values of losses that cannot work are refused, and the routers' losses are off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.embedding import Contrastive
from mcore_qwen3vl.losses.kto import Kto
from mcore_qwen3vl.losses.preference import Preference
from tests.losses.flags import BY_JSD, DISTILL, KTO, MODEL, RANK_4, TASK, WHOLE, parsed


def test_the_routers_losses_are_off(moe: Path) -> None:
    assert parsed(moe).compute.moe_aux_loss_coeff
    assert parsed(moe, "--loss", "dpo").compute.moe_aux_loss_coeff == 0
    assert parsed(moe, "--loss", "orpo").compute.moe_aux_loss_coeff == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dpo-beta", "0.2"), "--beta is set without --loss dpo, simpo, orpo or kto"),
        (("--loss", "dpo", "--beta", "0"), "beta is 0"),
        (("--loss", "dpo", "--overlong", "truncate"), "--overlong truncate with --loss dpo"),
        (("--loss", "dpo", "--dpo-reference", "adapter"), "needs an adapter to switch off"),
        (
            ("--loss", "dpo", *RANK_4, "--dpo-reference", "adapter", WHOLE, "merger"),
            "what trains whole cannot be switched off",
        ),
        (("--loss", "dpo", "--hidden-dropout", "0.1"), "--hidden-dropout 0.1 with --loss dpo: the"),
        (("--loss", "simpo", "--reference", "file"), "--loss simpo, which has no reference"),
        (("--loss", "orpo", *RANK_4, "--reference", "adapter"), "has no reference"),
        (("--loss", "orpo", "--rpo-alpha", "1"), "--rpo-alpha is set without --loss dpo or simpo"),
        (("--loss", "dpo", "--simpo-gamma", "1"), "--simpo-gamma is set without --loss simpo"),
        (("--loss", "simpo", "--simpo-gamma", "-1"), "simpo_gamma is -1"),
        (("--loss", "orpo", "--overlong", "truncate"), "--overlong truncate with --loss orpo"),
        (("--loss", "simpo", "--moe-z-loss-coeff", "0.01"), "with --loss simpo: Megatron"),
        (("--loss", "kto", *RANK_4, "--reference", "file"), "which no file has"),
        (("--loss", "kto", "--reference", "adapter", "--packing"), "needs an adapter"),
        (("--loss", "kto", *RANK_4), "with --micro-batch-size 1"),
        ((*KTO, "--undesirable-weight", "0"), "undesirable_weight is 0"),
        ((*KTO, "--rpo-alpha", "1"), "--rpo-alpha is set without --loss dpo or simpo"),
        ((*KTO, "--attention-dropout", "0.2"), "--attention-dropout 0.2 with --loss kto: the ref"),
        ((*KTO, "--overlong", "truncate"), "--overlong truncate with --loss kto"),
        ((*KTO, "--moe-z-loss-coeff", "0.01"), "with --loss kto: Megatron"),
        ((*MODEL,), "model without --load-hf or --pretrained-checkpoint: no flag names"),
        ((*MODEL, "--load-hf", "A", "--load", "B"), "model with --load: no flag names"),
        ((*MODEL, "--load-hf", "A", "--load", "B", "--save", "C"), "model with --load: no flag"),
        ((*MODEL, "--load-hf", "A", "--lora-init", "B"), "model with --lora-init: no flag names"),
        (("--loss", "dpo", "--reference-model", "A"), "is set without --reference model"),
        (("--reference-model", "A"), "--reference-model is set without --loss dpo or kto"),
        (("--desirable-weight", "2"), "--desirable-weight is set without --loss kto"),
        (("--loss", "dpo", "--moe-aux-loss-coeff", "0.01"), "--moe-aux-loss-coeff 0.01 with"),
        (("--loss", "dpo", "--moe-z-loss-coeff", "0.01"), "--moe-z-loss-coeff 0.01 with"),
        (("--distill-alpha", "0.1"), "--distill-alpha is set without --loss distill"),
        ((*DISTILL, "--distill-beta", "0.3"), "set without --distill-divergence jsd"),
        ((*DISTILL, *BY_JSD, "--distill-beta", "1"), "choose the divergences forward and reverse"),
        ((*DISTILL, "--distill-alpha", "1"), "distill_alpha is 1"),
        ((*DISTILL, "--distill-temperature", "0"), "distill_temperature is 0"),
        ((*DISTILL, "--overlong", "truncate"), "--overlong truncate with --loss distill"),
        (("--teacher", "X"), "--teacher is set without --loss distill"),
        ((*DISTILL, "--teacher-top-k", "8"), "--teacher-top-k is set without --teacher DIR"),
        ((*DISTILL, "--teacher", "X", "--teacher-top-k", "0"), "--teacher-top-k is 0; it must be"),
        ((*DISTILL, "--no-chunked-head"), "--no-chunked-head with --loss distill"),
        ((*DISTILL, "--beta", "0.3"), "--beta is set without --loss dpo"),
        ((*DISTILL, "--task", "reward"), "--loss distill with --task reward"),
        (("--temperature", "0.2"), "--temperature is set without --task embedding"),
        ((*TASK, "--temperature", "0"), "temperature is 0"),
        ((*TASK, "--answers", "a", "b"), "--answers is set without --task reranker"),
        (("--task", "reranker", "--temperature", "2"), "--temperature is set without --task emb"),
        (("--task", "reranker", "--loss", "dpo"), "--loss dpo with --task reranker"),
        (
            ("--task", "reranker", *RANK_4, "--lora-target", "q_proj", "lm_head"),
            "factors on lm_head.* with --task reranker",
        ),
        (
            ("--task", "reward", *RANK_4, WHOLE, "lm_head"),
            "--task reward, whose model has no lm_head",
        ),
        (("--task", "reward", "--pretrained-checkpoint", "x"), "starts from Hugging Face weights"),
        ((*TASK, "--matryoshka-dims", "4096"), "the model's embeddings have 48 values"),
        ((*TASK, "--loss", "dpo"), "--loss dpo with --task embedding"),
        ((*TASK, "--hidden-dropout", "0.1"), "computed twice in a step, and this would"),
        ((*TASK, "--overlong", "truncate"), "--overlong truncate with --task embedding"),
        ((*TASK, "--moe-z-loss-coeff", "0.01"), "with --task embedding: Megatron adds"),
        ((*TASK, *RANK_4, WHOLE, "lm_head"), "has no lm_head: leave it out"),
        (
            (*TASK, *RANK_4, "--lora-target", "q_proj", "--lora-dropout", "0.1"),
            r"lora_dropout is 0\.1 with --task embedding",
        ),
    ],
)
def test_what_is_refused(flags: tuple[str, ...], message: str, moe: Path) -> None:
    with pytest.raises(BadInput, match=message):
        parsed(moe, *flags)


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (Preference, {"beta": 0.0}, "beta is 0"),
        (Preference, {"label_smoothing": 0.5}, "dpo_label_smoothing is 0.5"),
        (Preference, {"label_smoothing": 0.1, "kind": "ipo"}, "belongs to the sigmoid loss"),
        (Preference, {"rpo_alpha": -1.0}, "rpo_alpha is -1"),
        (Preference, {"kind": "kto"}, "one of sigmoid, hinge, ipo, simpo, orpo"),
        (Preference, {"kind": "simpo", "gamma": -0.5}, "simpo_gamma is -0.5"),
        (Preference, {"gamma": 0.5}, "simpo_gamma belongs to simpo"),
        (Kto, {"beta": 0.0}, "beta is 0"),
        (Kto, {"desirable_weight": 0.0}, "desirable_weight is 0"),
        (Kto, {"undesirable_weight": 0.0}, "undesirable_weight is 0"),
        (Contrastive, {"temperature": 0.0}, "temperature is 0"),
        (Contrastive, {"dimensions": (0,)}, "at least 1"),
    ],
)
def test_values_without_a_meaning_are_refused(
    settings: type, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        settings(**values)
