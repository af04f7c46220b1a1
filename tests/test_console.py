"""What libraries say beside a command's own output."""

from __future__ import annotations

import logging

import pytest

from mcore_qwen3vl.console import quiet_libraries


def test_notes_of_libraries_are_not_shown_and_warnings_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    quiet_libraries()
    logging.basicConfig(level=logging.INFO)  # as megatron.training does when it is imported
    logging.getLogger("a.library").info("saved")
    logging.getLogger("a.library").warning("careful")
    assert capsys.readouterr() == ("", "warning: careful\n")
