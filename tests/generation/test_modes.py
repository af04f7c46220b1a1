"""A data set with records of both kinds teaches when to think, as docs/data.md says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import exit_code
from tests.generation.modes import ANSWERS, QUESTION, train_both_modes


@pytest.mark.slow
def test_a_mixed_run_learns_both_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = train_both_modes(tmp_path)
    capsys.readouterr()
    for thinks, answer in ANSWERS.items():
        arguments = json.dumps({"enable_thinking": thinks})
        asked = ("--chat-template-kwargs", arguments, "--prompt", QUESTION, "--temperature", "0")
        assert exit_code("generate", export, "--cpu", "--json", *asked) == 0
        (answered,) = json.loads(capsys.readouterr().out)["answers"]
        assert answered["text"] == answer
