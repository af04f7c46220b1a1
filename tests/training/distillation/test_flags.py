"""Flags of distillation that go together, and their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.settings import Distillation
from mcore_qwen3vl.training.data_provider import data_config
from tests.training.preference.test_flags import parsed

DISTILL = ("--loss", "distill")
JSD = ("--distill-divergence", "jsd")


def test_values_and_defaults(dense: Path) -> None:
    found = parsed(dense, *DISTILL, *JSD, "--distill-beta", "0.1", "--distill-temperature", "2")
    assert found.distillation.loss == Distillation("jsd", 0.1, 2.0)
    assert data_config(found).teacher_temperature == 2
    assert parsed(dense, *DISTILL).distillation.loss == Distillation("forward", 0.5, 1.0, 0.0)
    assert data_config(parsed(dense)).teacher_temperature is None


def test_a_live_teacher_needs_no_file_and_sees_what_is_cut_off(dense: Path) -> None:
    found = parsed(dense, *DISTILL, "--teacher", "X", "--overlong", "truncate")
    assert found.distillation.teacher_top_k == 64
    assert data_config(found).teacher_temperature is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
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
    ],
)
def test_what_is_refused(flags: tuple[str, ...], message: str, dense: Path) -> None:
    with pytest.raises(BadInput, match=message):
        parsed(dense, *flags)
