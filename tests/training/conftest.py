from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.training.forward_step import ForwardStep


@pytest.fixture
def checkpoint(kind: str, request: pytest.FixtureRequest) -> Path:
    """Return the checkpoint of the fixture that a test's parameter `kind` names."""
    path: Path = request.getfixturevalue(kind)
    return path


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, list[Any]]]:
    """Return a function that gives the records of each pass since the last call, and forgets them.

    Each rank notes the names of the micro-batches that its model computes.
    """
    notes = tmp_path / "notes"
    notes.mkdir()
    step = ForwardStep.__call__

    def noted(self: ForwardStep, batches: Iterator[Any], *given: Any, **more: Any) -> Any:
        batch = next(batches)
        kind = "train" if torch.is_grad_enabled() else "valid"
        with (notes / os.environ["RANK"]).open("a") as file:
            print(json.dumps([kind, [int(n.rsplit(":", 1)[1]) for n in batch.names]]), file=file)
        return step(self, iter([batch]), *given, **more)

    monkeypatch.setattr(ForwardStep, "__call__", noted)

    def read() -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"train": [], "valid": []}
        files = sorted(notes.iterdir())
        for file in files:
            for kind, names in map(json.loads, file.read_text().splitlines()):
                found[kind].append((file.name, names))
            file.unlink()
        return found

    return read
