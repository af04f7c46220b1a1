"""Training on this machine: what torchrun forwards to its ranks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_qwen3vl.training.local import FORWARDED_SIGNALS, forwarded_signals

ROOT = Path(__file__).parents[2]
OWN = "SIGTERM,SIGUSR2"


def forwarded_by_a_script(folder: Path, words: Sequence[str], own: str | None) -> str:
    """Return what a launch script lets torchrun forward, where `own` is in the environment."""
    torchrun = folder / "torchrun"
    torchrun.write_text("#!/bin/sh\necho $PET_SIGNALS_TO_HANDLE\n")
    torchrun.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin"} | (
        {"PET_SIGNALS_TO_HANDLE": own} if own else {}
    )
    command = ["bash", ROOT / "launch" / "sft_2b.sh", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("words", "own", "expected"),
    [
        ((), None, FORWARDED_SIGNALS),
        (("--exit-signal", "SIGUSR1"), None, FORWARDED_SIGNALS),
        (("--exit-signal", "SIGALRM"), None, f"{FORWARDED_SIGNALS},SIGALRM"),
        (("--exit-signal=SIGALRM",), None, f"{FORWARDED_SIGNALS},SIGALRM"),
        ((), OWN, OWN),
        (("--exit-signal", "SIGUSR1"), OWN, f"{OWN},SIGUSR1"),
    ],
)
def test_the_command_and_the_scripts_forward_the_exit_signal(
    words: tuple[str, ...],
    own: str | None,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PET_SIGNALS_TO_HANDLE", raising=False)
    if own:
        monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", own)
    assert forwarded_signals(words) == expected
    assert forwarded_by_a_script(tmp_path, words, own) == expected


def test_the_page_names_what_is_forwarded() -> None:
    page = (ROOT / "docs" / "resume.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"It forwards (SIG[^.]*?) and the signal of `--exit-signal`", page)
    assert ",".join(re.split(r",\s+", sentence)) == FORWARDED_SIGNALS


def test_torchrun_forwards_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is read, and what torchrun forwards by itself is in our list."""
    from torch.distributed import run as torchrun

    program = ["program.py"]
    monkeypatch.delenv("PET_SIGNALS_TO_HANDLE", raising=False)
    own = torchrun.parse_args(program).signals_to_handle
    assert set(own.split(",")) <= set(FORWARDED_SIGNALS.split(","))
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", FORWARDED_SIGNALS)
    assert torchrun.parse_args(program).signals_to_handle == FORWARDED_SIGNALS
