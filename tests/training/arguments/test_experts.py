"""Flags about routers and experts are refused or named where they would do something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from tests.training.arguments.commands import BASE, FIRST, parsed


@pytest.mark.parametrize(
    "flags",
    [
        ("--moe-router-force-load-balancing",),
        ("--moe-router-force-biased", "1"),
        ("--moe-pad-expert-input-to-capacity",),
        ("--moe-router-quantile-balancing-ema", "0.5"),
        ("--moe-apply-probs-on-input",),
        ("--moe-mlp-glu-interleave-size", "8"),
    ],
)
def test_what_would_route_or_compute_otherwise_is_refused(
    flags: tuple[str, ...], moe: Path
) -> None:
    with pytest.raises(BadInput, match=f"^{flags[0]}: "):
        CommandLine(["--hf-model", str(moe), *BASE, *flags]).check_names()


def test_flags_about_experts_are_named_for_a_model_without(dense: Path, moe: Path) -> None:
    def unused(model: Path, *flags: str) -> list[str]:
        return [str(u) for u in CommandLine(["--hf-model", str(model), *BASE, *flags]).unused()]

    (line,) = unused(dense, "--moe-z-loss-coeff", "1")
    assert "--moe-z-loss-coeff" in line
    assert "the model has no experts" in line
    assert not unused(moe, "--moe-z-loss-coeff", "1")
    (line,) = unused(moe, "--moe-token-drop-policy", "position")
    assert "it acts with --moe-expert-capacity-factor" in line
    assert not unused(moe, *FIRST)


def test_experts_are_one_product(moe: Path, dense: Path) -> None:
    assert parsed(moe).args.moe_grouped_gemm
    assert not parsed(dense).args.moe_grouped_gemm


def test_the_router_loss_comes_from_the_config_unless_given(moe: Path) -> None:
    assert parsed(moe).args.moe_aux_loss_coeff == 0.001
    assert parsed(moe, "--moe-aux-loss-coeff", "0").args.moe_aux_loss_coeff == 0
