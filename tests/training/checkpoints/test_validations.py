"""The validation losses of a run are read as a run wrote them, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.checkpoints.validations import Validations


def test_what_a_killed_run_noted_of_later_steps_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later best step is made, exported and kept again; what it was is not removed for it."""
    losses = {"losses": [[2, 1.5], [4, 0.5]], "best": [4, 0.5]}
    (tmp_path / "validation.json").write_text(json.dumps({**losses, "kept": 4, "exported": 4}))
    for step, noted in ((4, 4), (3, None)):
        validations = validations_of(tmp_path, monkeypatch)
        validations.read_losses(step)
        assert (validations.exported, validations._kept) == (noted, noted)


@pytest.mark.parametrize(
    "content",
    [
        *("[" * 100_000, "[]", "{", '{"losses": []}', '{"losses": [[1]], "kept": 1}'),
        *('{"losses": [], "kept": "../.."}', '{"losses": [[1, 1e999], ["a", 1]], "kept": 1}'),
    ],
)
def test_losses_that_no_run_wrote(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "validation.json").write_text(content)
    with pytest.raises(BadInput, match=r"validation\.json (is damaged|cannot be read|holds list)"):
        validations_of(tmp_path, monkeypatch).read_losses(4)


def validations_of(run: Path, monkeypatch: pytest.MonkeyPatch) -> Validations:
    """Return those of a run that keeps its best checkpoint in `run`, without a process group."""
    settings: Any = SimpleNamespace(
        training=SimpleNamespace(keep_best=True, early_stop_patience=None),
        checkpoints=SimpleNamespace(save=str(run), load=str(run)),
        model=SimpleNamespace(save_hf="exports"),
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    return Validations(settings)
