"""Where the reference of answers comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.losses.answers import AnswerLoss
from mcore_qwen3vl.losses.loss import FrozenModel
from mcore_qwen3vl.losses.preference import PreferenceLoss
from tests.losses.flags import MODEL, RANK_4, WHOLE, parsed


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
