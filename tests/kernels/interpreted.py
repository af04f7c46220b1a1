"""Runs files and tests whose kernels Triton interprets on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.docs.markdown import ROOT

ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}


def interpreted_json(file: str) -> dict[str, Any]:
    """Run a file in a process of its own, since Triton looks at the variable when it is imported.

    Returns:
        What its last line says, which is JSON.
    """
    done = subprocess.run(
        [sys.executable, file], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_interpreted(*words: str, timeout: float | None = None) -> str:
    """Run Python with these words, kernels interpreted, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout
