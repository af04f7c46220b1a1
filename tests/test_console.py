"""What libraries say beside a command's own output, and text that would steer the terminal."""

from __future__ import annotations

import logging

import pytest

from mcore_qwen3vl.console import plain, quiet_libraries


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


def test_text_of_others_does_not_steer_the_terminal() -> None:
    assert plain("a\x1b]0;title\x07\r\x9b2J[bold]\tb\nc") == (
        r"a\x1b]0;title\x07\x0d\x9b2J\[bold]" + "\tb\nc"
    )
