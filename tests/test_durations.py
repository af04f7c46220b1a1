"""The files that took longest run first, by a record of every file's seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import durations

pytest_plugins = ("pytester",)

ROOT = Path(__file__).parents[1]


def test_the_longest_files_run_first_and_what_ran_is_recorded(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durations, "LEAST", 0.2)
    pytester.makeini("[pytest]")
    pytester.makeconftest("pytest_plugins = ('tests.turns', 'tests.durations')")
    sleep = "import time\ndef test_one(): time.sleep({})\n"
    pytester.makepyfile(test_a=sleep.format(0), test_b=sleep.format(0), test_c=sleep.format(0.3))
    record = pytester.mkdir("tests") / "durations.json"
    record.write_text(json.dumps({"test_b.py": 30, "test_c.py": 20, "test_gone.py": 9}))
    done = pytester.runpytest("-v", "--record-durations")
    done.stdout.fnmatch_lines(["test_b.py*", "test_c.py*", "test_a.py*"])
    recorded = json.loads(record.read_text())
    assert list(recorded) == ["test_c.py"]
    assert 0.2 < recorded["test_c.py"] < 5
    pytester.runpytest("test_a.py", "--record-durations")
    assert json.loads(record.read_text()) == recorded


def test_every_recorded_file_exists() -> None:
    recorded = json.loads((ROOT / "tests" / "durations.json").read_text("utf-8"))
    assert recorded
    assert [file for file in recorded if not (ROOT / file).exists()] == []
