"""Which losses there are, which one a command line means, and whole losses of other packages."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses import registry
from mcore_qwen3vl.losses.kto import KtoLoss
from mcore_qwen3vl.losses.loss import Loss
from mcore_qwen3vl.losses.reward import Reward
from mcore_qwen3vl.losses.tokens import TokenLoss
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.arguments.settings import add_arguments
from mcore_qwen3vl.training.logs.terminal import loss_name
from mcore_qwen3vl.training.objectives import forward_step_of, passes_of


@dataclass(frozen=True)
class Focal(Loss):
    """A loss that another package brings."""

    gamma: float | None = None
    """focal: how little easy tokens count; default 2"""

    names = ("focal",)
    group = "my package"
    help = "focal of my package"
    unit = "words"
    logged = ("focal loss",)

    def complete(self, run: Any, lora: Any, architecture: Any) -> Focal:
        return Focal(self.name, 2.0 if self.gamma is None else self.gamma)

    def objective(self, run: Any, lora: Any) -> Any:
        return ("the objective of", self.gamma)

    def compute(self, run: Any) -> Any:
        return "its way through the model"

    def schedule(self, run: Any, lora: Any, frozen: Any) -> Any:
        return lambda schedule, **arguments: ("twice", schedule, arguments)


NOT_A_LOSS = 3


class Kto(Loss):
    names = ("kto",)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Install another package, whose entry point is the parameter."""
    entry = EntryPoint("theirs", f"{__name__}:{request.param}", registry.GROUP)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    _forget()
    yield
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    from mcore_qwen3vl.training.arguments import command_line

    for cached in (registry.all_losses, registry._owners_of_flags, command_line._parser):
        cached.cache_clear()


def validated(checkpoint: Path, *flags: str) -> Any:
    common = ("--cpu", "--hf-model", str(checkpoint), "--data-path", "x.jsonl")
    return validate([*common, "--train-iters", "1", *flags], 1).settings


@pytest.mark.parametrize("installed", ["Focal"], indirect=True)
def test_another_package_brings_a_whole_loss(installed: None, dense: Path) -> None:
    settings = validated(dense, "--loss", "focal", "--gamma", "3")
    assert settings.loss == Focal("focal", 3.0)
    step: Any = forward_step_of(settings)
    assert (step._objective, step._run) == (
        ("the objective of", 3.0),
        "its way through the model",
    )
    wrapped = passes_of(settings, None)(lambda: "Megatron's")
    assert wrapped(forward_only=False) == ("twice", "Megatron's", {"forward_only": False})
    assert loss_name(["grad norm", "focal loss"]) == "focal loss"
    assert validated(dense, "--loss", "focal").loss.gamma == 2.0


@pytest.mark.parametrize("installed", ["Focal"], indirect=True)
def test_its_flags_are_in_the_help_and_are_refused_without_it(installed: None, dense: Path) -> None:
    text = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    assert "my package: --gamma X focal: how little easy tokens count; default 2" in text
    assert "focal of my package, a registered loss, module:function" in text
    with pytest.raises(BadInput, match="--gamma is set without --loss focal: add it, or drop"):
        validated(dense, "--gamma", "3")
    with pytest.raises(BadInput, match="kto, distill, focal; or name a function"):
        validated(dense, "--loss", "fokal")


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ("NOT_A_LOSS", r"theirs of mcore_qwen3vl.loss_families is .*:NOT_A_LOSS, which is no sub"),
        ("GONE", "which cannot be imported: AttributeError: .* no attribute 'GONE'. Correct"),
        ("Kto", "theirs of mcore_qwen3vl.loss_families names a loss kto, as another loss does"),
    ],
    indirect=["installed"],
)
def test_what_is_no_loss_of_its_own_is_refused(installed: None, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        registry.all_losses()


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({"loss": "kto", "task": None}, KtoLoss),
        ({"loss": "cross_entropy", "task": "reward"}, Reward),
        ({"loss": "my.losses:focal"}, TokenLoss),
        ({}, TokenLoss),
    ],
)
def test_which_loss_a_command_line_means(flags: dict[str, Any], kind: type[Loss]) -> None:
    assert registry.kind_of(flags) is kind


def test_an_unknown_loss_is_refused_and_those_that_exist_are_listed() -> None:
    with pytest.raises(BadInput, match=r"--loss dop is .*There are cross_entropy, .*dpo, .*kto"):
        registry.kind_of({"loss": "dop"})


def test_a_function_of_an_entry_point_is_a_loss_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "registered", lambda: {"mine": None})
    assert registry.kind_of({"loss": "mine"}) is TokenLoss


def test_no_two_losses_have_a_name_or_a_logged_name_in_common() -> None:
    for of in ("names", "logged"):
        found = [name for loss in registry.BUILT_IN for name in getattr(loss, of)]
        assert len(set(found)) == len(found) >= len(registry.BUILT_IN)


def test_the_registry_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, mcore_qwen3vl.losses.registry as r; r.help_of_loss(); "
        "sys.exit(bool({'torch', 'megatron', 'transformers', 'peft'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
