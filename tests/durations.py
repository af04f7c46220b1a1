"""The longest files of tests run first, so that no worker ends late with one.

``--record-durations`` writes the seconds of every file that ran to ``tests/durations.json``. Files
that did not run keep theirs; removed and short files are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.turns import reports_of, seconds_of_files

LEAST = 5.0
"""Seconds below which a file is not recorded: its place in the order does not matter."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    group.addoption(
        "--record-durations", action="store_true", help="write the seconds of every file that runs"
    )


def record_of(config: pytest.Config) -> Path:
    return config.rootpath / "tests" / "durations.json"


def read(record: Path) -> dict[str, float]:
    return json.loads(record.read_text("utf-8")) if record.exists() else {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = read(record_of(config))
    items.sort(key=lambda item: -seconds.get(item.nodeid.split("::")[0], 0.0))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not config.getoption("--record-durations"):
        return
    record = record_of(config)
    seconds = read(record) | seconds_of_files(reports_of(terminalreporter))
    kept = {
        file: round(spent, 1)
        for file, spent in sorted(seconds.items(), key=lambda one: -one[1])
        if spent >= LEAST and (config.rootpath / file).exists()
    }
    record.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
