"""The mark of slow tests, and two options of pytest that let slow tests take turns.

``--turn K/N`` runs the K-th of N shares of the test files; every file is in one share.
``--start-until SECONDS`` (since 1970) starts no test after that moment. Tests that did not start
are skipped and named in the summary.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NOT_STARTED = "not started: the time for this check is over"


def slow_except(rows: Sequence[Any], *fast: Any) -> list[Any]:
    """Mark all `rows` for ``parametrize`` slow but the `fast` ones; a tuple is several values.

    Raises:
        ValueError: a fast row is not among `rows`.
    """
    for row in fast:
        if row not in rows:
            raise ValueError(f"{row} is not one of the rows")
    return [row if row in fast else slow(row)[0] for row in rows]


def slow(*rows: Any) -> list[Any]:
    """Mark these rows for ``parametrize`` slow; a tuple is several values."""
    return [
        pytest.param(*row if isinstance(row, tuple) else (row,), marks=pytest.mark.slow)
        for row in rows
    ]


@dataclass(frozen=True)
class Turn:
    """The `number`-th of `count` shares, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Turn:
        """Read ``K/N``; K may be any whole number and is taken modulo N.

        Raises:
            pytest.UsageError: `text` is something else.
        """
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(count) > 0):
            raise pytest.UsageError(f"--turn {text}: expected K/N, for instance 2/3")
        return cls((int(number) - 1) % int(count) + 1, int(count))

    def share(self, files: set[Path]) -> set[Path]:
        """Return the files of this turn: every `count`-th of the sorted list."""
        return set(sorted(files)[self.number - 1 :: self.count])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("turns")
    group.addoption("--turn", metavar="K/N", type=Turn.parse, help="run one share of the files")
    group.addoption(
        "--start-until", metavar="SECONDS", type=float, help="start no test after this time"
    )


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`, so that tests they leave out do not count
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turn: Turn | None = config.getoption("--turn")
    if turn is None:
        return
    share = turn.share({item.path for item in items})
    config.hook.pytest_deselected(items=[item for item in items if item.path not in share])
    items[:] = [item for item in items if item.path in share]


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--start-until")
    if until is not None and time.time() > until:
        pytest.skip(NOT_STARTED)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Write the seconds of every file that ran, and the tests that did not start."""
    options = map(config.getoption, ("--turn", "--start-until"))
    if config.option.collectonly or all(option is None for option in options):
        return
    reports = reports_of(terminalreporter)
    waiting = [r.nodeid for r in reports if r.skipped and NOT_STARTED in str(r.longrepr)]
    terminalreporter.section("what ran")
    for file, spent in sorted(seconds_of_files(reports).items()):
        terminalreporter.write_line(f"{spent:7.1f} s  {file}")
    for test in waiting:
        terminalreporter.write_line(f"not started: {test}")


def reports_of(terminalreporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    groups = terminalreporter.stats.values()
    return [one for group in groups for one in group if isinstance(one, pytest.TestReport)]


def seconds_of_files(reports: Sequence[pytest.TestReport]) -> dict[str, float]:
    """Return the seconds of every file that ran, with those of its fixtures."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        seconds[report.nodeid.split("::")[0]] += report.duration
    return seconds
