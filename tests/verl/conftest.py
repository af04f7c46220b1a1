"""VERL on the CPU, and Hugging Face's numbers, which it must give.

Every file here skips itself where VERL is not installed; ``make test-verl`` makes an environment
that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.tiny_checkpoint import FamilyName
from tests.verl import reference, samples

if find_spec("verl"):
    import mcore_qwen3vl.runtime.verl_cpu
    import mcore_qwen3vl.verl  # noqa: F401


@dataclass(frozen=True)
class Case:
    """A checkpoint, samples for it, and Hugging Face's numbers for them."""

    path: Path
    samples: list[Any]
    expected: Any

    @cached_property
    def noise(self) -> float:
        """How far the log-probabilities of Hugging Face's model in bfloat16 are from float32."""
        rounded = reference.log_probs_in_bfloat16(self.path, self.samples)
        pairs = zip(rounded, self.expected.log_probs, strict=True)
        return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """Return a function that gives a case by kind of checkpoint and of samples, made once."""
    made: dict[tuple[Any, ...], Case] = {}

    def make(kind: str = "dense", media: str = "images") -> Case:
        key = (kind, media)
        if key not in made:
            path = tmp_path_factory.mktemp(kind)
            layout = "v5" if kind.endswith("v5") else "published"
            family: FamilyName = "qwen3.5" if "hybrid" in kind else "qwen3-vl"
            write_tiny_checkpoint(
                path, family=family, moe="moe" in kind, tie=kind == "tied", layout=layout
            )
            given = samples.make(path, media)
            made[key] = Case(path, given, reference.of(path, given))
        return made[key]

    return make


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[Any]]:
    """Return ``on_ranks(world_size, function, *args)``, which gives what each rank returns."""

    def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        return run_layout(function, world_size, *args, timeout=240)

    return run
