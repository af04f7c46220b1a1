"""Flags of losses and tasks that go together, their values, and where a reference comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.answers import AnswerLoss
from mcore_qwen3vl.losses.distillation import Distillation, DistillationLoss
from mcore_qwen3vl.losses.embedding import Contrastive, Embedding
from mcore_qwen3vl.losses.kto import Kto, KtoLoss
from mcore_qwen3vl.losses.loss import FrozenModel, Loss
from mcore_qwen3vl.losses.preference import Preference, PreferenceLoss
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.data_provider import data_config

RANK_4 = ("--lora-rank", "4")
WHOLE = "--lora-modules-to-save"
KTO = ("--loss", "kto", *RANK_4, "--packing")
MODEL = ("--loss", "dpo", "--reference", "model")
DISTILL = ("--loss", "distill")
JSD = ("--distill-divergence", "jsd")
TASK = ("--task", "embedding")


def parsed(checkpoint: Path, *flags: str) -> Settings:
    common = ("--cpu", "--hf-model", str(checkpoint), "--data-path", "x.jsonl")
    return validate([*common, "--train-iters", "1", *flags], 1).settings


def loss_of[Kind: Loss](checkpoint: Path, kind: type[Kind], *flags: str) -> Kind:
    loss = parsed(checkpoint, *flags).loss
    assert isinstance(loss, kind)
    return loss


def test_values_and_defaults(dense: Path) -> None:
    flags = ("--loss", "dpo", "--dpo-beta", "0.4", "--rpo-alpha", "2", *RANK_4)
    assert loss_of(dense, PreferenceLoss, *flags).pair_settings == Preference(
        beta=0.4, rpo_alpha=2.0
    )
    of_simpo, of_orpo = (PreferenceLoss(loss).pair_settings for loss in ("simpo", "orpo"))
    assert of_simpo == Preference("simpo", 2.0, gamma=1.0)
    assert of_orpo == Preference("orpo", 0.1, rpo_alpha=1.0)


def test_values_and_defaults_of_kto(dense: Path) -> None:
    found = parsed(dense, *KTO, "--beta", "0.4", "--desirable-weight", "1.5")
    assert isinstance(found.loss, KtoLoss)
    assert found.loss.settings == Kto(0.4, 1.5, 1.0)
    assert found.loss.reference_of(found.lora) == "adapter"
    assert loss_of(dense, KtoLoss, *KTO).settings == Kto()


@pytest.mark.parametrize(
    ("flags", "reference"),
    [
        ((), "file"),
        (RANK_4, "adapter"),
        ((*RANK_4, "--dpo-reference", "file"), "file"),
        # An adapter that training starts from is part of the reference.
        (("--lora-init", "ADAPTER"), "file"),
        (("--lora-init", "ADAPTER", "--dpo-reference", "adapter"), "adapter"),
        ((*RANK_4, WHOLE, "merger"), "file"),
        (("--loss", "orpo", *RANK_4), None),
        (("--loss", "simpo"), None),
    ],
)
def test_where_the_reference_comes_from(
    flags: tuple[str, ...], reference: str | None, dense: Path
) -> None:
    found = parsed(dense, "--loss", "dpo", *flags)
    assert isinstance(found.loss, PreferenceLoss)
    assert found.loss.reference_of(found.lora) == reference


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        (("--loss", "kto", "--packing", "--load-hf", "A"), "A"),
        ((*MODEL, "--pretrained-checkpoint", "A", "--save", "B"), "A"),
        # Megatron reads it after the weights of --load-hf.
        ((*MODEL, "--load-hf", "A", "--pretrained-checkpoint", "B"), "B"),
        ((*MODEL, "--load-hf", "A", "--load", "B/", "--save", "B"), "A"),
        ((*MODEL, "--load", "A", "--reference-model", "B"), "B"),
        ((*MODEL, "--load-hf", "A", *RANK_4, WHOLE, "merger"), "A"),
    ],
)
def test_the_reference_model_is_what_training_starts_from(
    flags: tuple[str, ...], model: str, dense: Path
) -> None:
    found = parsed(dense, *flags)
    assert isinstance(found.loss, AnswerLoss)
    assert found.loss.frozen_model(found, found.lora) == FrozenModel("--reference-model", model)


def test_the_routers_losses_are_off(moe: Path) -> None:
    assert parsed(moe).compute.moe_aux_loss_coeff
    assert parsed(moe, "--loss", "dpo").compute.moe_aux_loss_coeff == 0
    assert parsed(moe, "--loss", "orpo").compute.moe_aux_loss_coeff == 0


def test_values_and_defaults_of_a_distillation(dense: Path) -> None:
    found = parsed(dense, *DISTILL, *JSD, "--distill-beta", "0.1", "--distill-temperature", "2")
    assert isinstance(found.loss, DistillationLoss)
    assert found.loss.settings == Distillation("jsd", 0.1, 2.0)
    assert data_config(found).teacher_temperature == 2
    assert loss_of(dense, DistillationLoss, *DISTILL).settings == Distillation(
        "forward", 0.5, 1.0, 0.0
    )
    assert data_config(parsed(dense)).teacher_temperature is None


def test_a_live_teacher_needs_no_file_and_sees_what_is_cut_off(dense: Path) -> None:
    found = parsed(dense, *DISTILL, "--teacher", "X", "--overlong", "truncate")
    assert isinstance(found.loss, DistillationLoss)
    assert found.loss.teacher_top_k == 64
    assert data_config(found).teacher_temperature is None


def test_values_and_defaults_of_an_embedding(moe: Path) -> None:
    found = parsed(moe, *TASK, "--temperature", "0.2", "--matryoshka-dims", "8", "16")
    assert isinstance(found.loss, Embedding)
    assert found.loss.contrastive == Contrastive(0.2, (8, 16))
    assert found.compute.moe_aux_loss_coeff == 0
    assert loss_of(moe, Embedding, *TASK).contrastive == Contrastive(0.05)


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
        ((*DISTILL, *JSD, "--distill-beta", "1"), "choose the divergences forward and reverse"),
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
