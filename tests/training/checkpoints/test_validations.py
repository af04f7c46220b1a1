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


def test_the_best_checkpoint_is_said_to_be_in_the_folder_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on in another folder does not copy it."""
    losses = [[1, 3.0], [2, 2.0], [3, 2.5]]
    (tmp_path / "validation.json").write_text(
        json.dumps({"losses": losses, "best": losses[1], "kept": 2, "exported": None})
    )
    for save, held in ((tmp_path, tmp_path), (tmp_path / "other", tmp_path)):
        validations = validations_of(tmp_path, monkeypatch, save)
        validations.read_losses(3)
        assert str(validations).endswith(f"after step 2, kept in {held}")
    monkeypatch.setattr(Validations, "_write", lambda self: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    validations.add(4, {"lm loss": 1.0})
    assert str(validations).endswith(f"after step 4, kept in {tmp_path / 'other'}")


def validations_of(
    run: Path, monkeypatch: pytest.MonkeyPatch, save: Path | None = None
) -> Validations:
    """Return those of a run that keeps its best checkpoint, without a process group.

    It goes on from `run`, and in it if `save` is None.
    """
    settings: Any = SimpleNamespace(
        training=SimpleNamespace(keep_best=True, early_stop_patience=None),
        checkpoints=SimpleNamespace(save=str(save or run), load=str(run)),
        model=SimpleNamespace(save_hf="exports"),
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    return Validations(settings)
