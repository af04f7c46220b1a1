"""Flags of preference training that go together, and where the reference comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.settings import Kto, Preference
from mcore_qwen3vl.training.arguments.losses import PreferenceSettings
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.arguments.settings import Settings

KTO = ("--loss", "kto", "--lora-rank", "4", "--packing")


MODEL = ("--loss", "dpo", "--reference", "model")


def parsed(checkpoint: Path, *flags: str) -> Settings:
    common = ("--cpu", "--hf-model", str(checkpoint), "--data-path", "x.jsonl")
    return validate([*common, "--train-iters", "1", *flags], 1).settings


def test_values_and_defaults(dense: Path) -> None:
    found = parsed(
        dense, "--loss", "dpo", "--dpo-beta", "0.4", "--rpo-alpha", "2", "--lora-rank", "4"
    )
    assert found.preference.pair_settings("dpo") == Preference(beta=0.4, rpo_alpha=2.0)
    of_simpo, of_orpo = (PreferenceSettings().pair_settings(loss) for loss in ("simpo", "orpo"))
    assert of_simpo == Preference("simpo", 2.0, gamma=1.0)
    assert of_orpo == Preference("orpo", 0.1, rpo_alpha=1.0)


def test_values_and_defaults_of_kto(dense: Path) -> None:
    found = parsed(dense, *KTO, "--beta", "0.4", "--desirable-weight", "1.5")
    assert found.preference.kto == Kto(0.4, 1.5, 1.0)
    assert found.reference == "adapter"
    assert parsed(dense, *KTO).preference.kto == Kto()


@pytest.mark.parametrize(
    ("flags", "reference"),
    [
        ((), "file"),
        (("--lora-rank", "4"), "adapter"),
        (("--lora-rank", "4", "--dpo-reference", "file"), "file"),
        # An adapter that training starts from is part of the reference.
        (("--lora-init", "ADAPTER"), "file"),
        (("--lora-init", "ADAPTER", "--dpo-reference", "adapter"), "adapter"),
        (("--lora-rank", "4", "--lora-modules-to-save", "merger"), "file"),
        (("--loss", "orpo", "--lora-rank", "4"), None),
        (("--loss", "simpo"), None),
    ],
)
def test_where_the_reference_comes_from(
    flags: tuple[str, ...], reference: str | None, dense: Path
) -> None:
    assert parsed(dense, "--loss", "dpo", *flags).reference == reference


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        (("--loss", "kto", "--packing", "--load-hf", "A"), "A"),
        ((*MODEL, "--pretrained-checkpoint", "A", "--save", "B"), "A"),
        # Megatron reads it after the weights of --load-hf.
        ((*MODEL, "--load-hf", "A", "--pretrained-checkpoint", "B"), "B"),
        ((*MODEL, "--load-hf", "A", "--load", "B/", "--save", "B"), "A"),
        ((*MODEL, "--load", "A", "--reference-model", "B"), "B"),
        ((*MODEL, "--load-hf", "A", "--lora-rank", "4", "--lora-modules-to-save", "merger"), "A"),
    ],
)
def test_the_reference_model_is_what_training_starts_from(
    flags: tuple[str, ...], model: str, dense: Path
) -> None:
    found = parsed(dense, *flags)
    assert (found.reference, found.preference.reference_model) == ("model", model)


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
            (*("--loss", "dpo", "--lora-rank", "4", "--dpo-reference", "adapter"),
             *("--lora-modules-to-save", "merger")),
            "what trains whole cannot be switched off",
        ),
        (("--loss", "simpo", "--reference", "file"), "--loss simpo, which has no reference"),
        (("--loss", "orpo", "--lora-rank", "4", "--reference", "adapter"), "has no reference"),
        (("--loss", "orpo", "--rpo-alpha", "1"), "--rpo-alpha is set without --loss dpo or simpo"),
        (("--loss", "dpo", "--simpo-gamma", "1"), "--simpo-gamma is set without --loss simpo"),
        (("--loss", "simpo", "--simpo-gamma", "-1"), "simpo_gamma is -1"),
        (("--loss", "orpo", "--overlong", "truncate"), "--overlong truncate with --loss orpo"),
        (("--loss", "simpo", "--moe-z-loss-coeff", "0.01"), "with --loss simpo: Megatron"),
        (("--loss", "kto", "--lora-rank", "4", "--reference", "file"), "which no file has"),
        (("--loss", "kto", "--reference", "adapter", "--packing"), "needs an adapter"),
        (("--loss", "kto", "--lora-rank", "4"), "with --micro-batch-size 1"),
        ((*KTO, "--undesirable-weight", "0"), "undesirable_weight is 0"),
        ((*KTO, "--rpo-alpha", "1"), "--rpo-alpha is set without --loss dpo or simpo"),
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
    ],
)  # fmt: skip
def test_what_is_refused(flags: tuple[str, ...], message: str, moe: Path) -> None:
    with pytest.raises(BadInput, match=message):
        parsed(moe, *flags)
