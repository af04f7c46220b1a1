"""The hooks of the encoder, in the order in which energon and the loader call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.encoding.balanced import BalancedTaskEncoder
from mcore_qwen3vl.data.encoding.encoder import Qwen3VLTaskEncoder
from tests.data.loaders import MakeLoader

HOOKS = (
    "read_block",
    "cook",
    "preencode_sample",
    "select_samples_to_pack",
    "postencode_sample",
    "pack_selected_samples",
    "batch",
)
RECORD = ["cook", "preencode_sample"]
ROW = [*[*RECORD, "postencode_sample"] * 2, "batch"]
PACK = [*RECORD * 2, "select_samples_to_pack", *["postencode_sample"] * 2, "pack_selected_samples"]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the hooks as they are called."""
    names: list[str] = []

    def note(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(hook)  # energon asks for a hook's name, and for its mark of being stateless
        def noting(self: Any, *args: Any) -> Any:
            names.append(name)
            return hook(self, *args)

        return noting

    for encoder in (Qwen3VLTaskEncoder, BalancedTaskEncoder):
        for name in HOOKS:
            if name in vars(encoder):
                monkeypatch.setattr(encoder, name, note(vars(encoder)[name], name))
    return names


@pytest.mark.parametrize(
    ("kind", "packing", "expected"),
    [
        ("jsonl", False, ["read_block", *ROW]),
        ("tars", False, ROW),
        ("jsonl", True, PACK),
        ("tars", True, PACK),
    ],
    ids=["rows of numbered records", "rows of tars", "packs of numbered records", "packs of tars"],
)
def test_hooks_are_called_in_the_documented_order(
    kind: str,
    packing: bool,
    expected: list[str],
    called: list[str],
    make: MakeLoader,
    written: Callable[[str], Path],
) -> None:
    config = DataConfig(
        seq_length=512,
        shuffle=False,
        micro_batch_size=1 if packing else 2,
        packing=packing,
        balance=False,
        packing_buffer=2 if packing else None,
    )
    loader = make(written(kind), config=config)
    called.clear()
    next(loader)
    assert called[: len(expected)] == expected
