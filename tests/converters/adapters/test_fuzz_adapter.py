"""An adapter's damaged files are refused cleanly, or read as what they now say."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_qwen3vl.converters.adapters.adapter import read_adapter, write_adapter
from tests.converters.adapters.conftest import Made
from tests.converters.fuzz import Damage, spoil_header, spoil_json, trial

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SPOIL = {"weights": (WEIGHTS, spoil_header), "config": (CONFIG, spoil_json)}
COUNT = 12
"""Cases in a default run; the slow run makes 25 times as many for each kind."""


def same(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal; NaN equals itself here."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or (type(a) is type(b) and a == b)


def attempt_in(folder: Path, base: Path) -> Callable[[], str | None]:
    """Return a trial that reads and rewrites: other code must read the same from the copy."""

    def attempt() -> str | None:
        back = folder.parent / "back"
        shutil.rmtree(back, ignore_errors=True)
        adapter = read_adapter(folder, base)
        write_adapter(
            back, adapter.config, adapter.factors, adapter.saved, base, roles=adapter.roles
        )
        before, after = load_file(folder / WEIGHTS), load_file(back / WEIGHTS)
        if before.keys() != after.keys():
            return "other keys"
        for key, tensor in before.items():
            if tensor.dtype != after[key].dtype or not torch.equal(tensor, after[key]):
                return f"another tensor {key}"
        said, written = (json.loads((f / CONFIG).read_text()) for f in (folder, back))
        return None if same(said, {key: written[key] for key in said}) else "another config"

    return attempt


def fuzz(part: str, made: Made, tmp_path: Path, *, count: int, seed: str) -> None:
    folder = Path(shutil.copytree(made.folder, tmp_path / "adapter"))
    file, mutate = SPOIL[part]
    attempt = attempt_in(folder, made.base)
    assert attempt() is None
    damages = [Damage(folder / file, mutate)]
    tally = trial(damages, attempt, count, f"{seed} {part}", tmp_path)
    print(f"{part}: {tally.refused} refused, {tally.equal} equal of {count}")
    assert not tally.defects, f"{len(tally.defects)} defects: " + "\n".join(tally.defects[:8])
    assert tally.refused + tally.equal == count
    assert tally.refused > count // 10  # the damage does reach the readers


@pytest.mark.slow
@pytest.mark.parametrize("part", SPOIL)
def test_fuzz(part: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    fuzz(part, made("rank patterns"), tmp_path, count=COUNT, seed="2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rank patterns", "swapped roles", "tied", "some layers"])
@pytest.mark.parametrize("part", SPOIL)
def test_fuzz_at_length(part: str, kind: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    fuzz(part, made(kind), tmp_path, count=25 * COUNT, seed=f"long {kind}")
