"""The command itself, on the workbench that all tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.pretended import Workbench
from mcore_qwen3vl.tiny import tiny_config

Command = Callable[..., tuple[int, Any]]


@pytest.fixture
def command(
    workbench: Workbench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Return a function that runs ``rehearse --json``, and gives its exit code and output."""
    from mcore_qwen3vl.cli import main
    from mcore_qwen3vl.rehearsal import rehearse

    # Imports take fifteen seconds; the shared workbench has done them.
    monkeypatch.setattr(rehearse, "Workbench", lambda *_: nullcontext(workbench))

    def call(*words: object) -> tuple[int, Any]:
        code = 0
        try:
            main(["rehearse", "--json", *map(str, words)])
        except SystemExit as left:
            code = int(left.code or 0)
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with nothing but the config of a tiny MoE model."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(tiny_config(moe=True)))
    return folder
