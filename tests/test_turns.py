"""Slow tests take turns: each file has one turn, and no test starts after the time is over."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.turns import Turn, slow_except

pytest_plugins = ("pytester",)

FILES = {Path(f"tests/test_{letter}.py") for letter in "abcdefg"}


def test_each_file_has_one_turn() -> None:
    shares = [Turn.parse(f"{number}/3").share(FILES) for number in (1, 2, 3)]
    assert sum(map(len, shares)) == len(FILES)
    assert set().union(*shares) == FILES
    assert {len(share) for share in shares} == {2, 3}
    assert Turn.parse("7/3") == Turn(1, 3)  # the hash of a commit may be any number


@pytest.mark.parametrize("text", ["", "2", "1/0", "a/b", "-1/3"])
def test_a_malformed_turn_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="expected K/N"):
        Turn.parse(text)


def test_rows_are_slow_except_the_named_ones() -> None:
    rows = slow_except([("a", 1), ("b", 2)], ("b", 2))
    assert rows == [pytest.param("a", 1, marks=pytest.mark.slow), ("b", 2)]
    with pytest.raises(ValueError, match="'c', 3"):
        slow_except([("a", 1)], ("c", 3))


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Make three files of tests, some of them slow, with the options of this suite."""
    pytester.makeconftest("pytest_plugins = ('tests.turns',)")
    pytester.makepyfile(
        test_a="import pytest\n@pytest.mark.slow\ndef test_one(): pass\n",
        test_b="import pytest\n@pytest.mark.slow\ndef test_two(): pass\ndef test_fast(): pass\n",
        test_c="def test_three(): pass\n",
    )
    return pytester


def test_a_turn_runs_its_files_and_says_so(suite: pytest.Pytester) -> None:
    for turn, name in ((1, "test_a.py"), (2, "test_b.py")):
        done = suite.runpytest("-m", "slow", "--turn", f"{turn}/2")
        done.assert_outcomes(passed=1, deselected=3)
        done.stdout.fnmatch_lines([f"*0.0 s  {name}"])


def test_what_did_not_start_in_time_is_named(suite: pytest.Pytester) -> None:
    done = suite.runpytest("--start-until", str(time.time() - 1))
    done.assert_outcomes(skipped=4)
    done.stdout.fnmatch_lines(["not started: test_a.py::test_one"])
    suite.runpytest("--start-until", str(time.time() + 60)).assert_outcomes(passed=4)
