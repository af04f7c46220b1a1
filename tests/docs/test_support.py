"""docs/support.md has a tier for each loss, launch script and make target, and what shows it."""

from __future__ import annotations

import re
from itertools import product

from mcore_qwen3vl.launch.catalogue import scripts
from mcore_qwen3vl.losses.registry import BUILT_IN
from tests.docs.markdown import ROOT

PAGE = ROOT / "docs" / "support.md"
TIERS = ("core", "tool", "kept", "frozen", "untried", "refused")
RUNNERS = {"test-slow", "test-all", "test-durations", "test-contexts"}
"""Targets that run the same tests in another way."""


def rows() -> list[list[str]]:
    """Return the cells of each capability: what, tier, shown by, on a GPU."""
    lines = PAGE.read_text().partition("\n## ")[2].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return [row for row in cells if row[0] != "capability" and set(row[0]) != {"-"}]


def expanded(name: str) -> list[str]:
    """Return the names that a shell makes of braces: ``{a,b}_c`` is ``a_c`` and ``b_c``."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    return ["".join(part) for part in product(*parts)] if "{" in name else [name]


def test_every_loss_has_a_tier():
    named = {
        (row[0].split()[0].strip("`"), name)
        for row in rows()
        if row[0].startswith(("`--loss", "`--task"))
        for name in re.findall(r"`(?:--\w+ )?(\w+)`", row[0])
    }
    assert named == {(loss.flag, name) for loss in BUILT_IN for name in loss.names}


def test_every_launch_script_has_a_tier():
    words = [word for row in rows() for word in re.findall(r"`(\S+\.(?:sh|yaml))`", row[0])]
    named = [name for word in words for name in expanded(word)]
    assert sorted(named) == sorted(script.name for script in scripts().values())


def test_every_row_has_a_tier_and_what_shows_it():
    found = rows()
    assert len(found) > 60
    for capability, tier, shown_by, _ in found:
        assert tier.split(",")[0] in TIERS, capability
        paths = re.findall(r"`(tests/[\w/.]+)`", shown_by)
        assert all((ROOT / path).exists() for path in paths), shown_by
        assert paths or "`make " in shown_by or tier == "untried" or "same files" in shown_by
        assert tier != "kept" or "`make " in shown_by, capability


def test_every_target_that_tests_something_else_shows_a_row():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^(test-[a-z]+):.*##", text, re.MULTILINE)) - RUNNERS
    assert len(targets) > 8
    assert targets == set(re.findall(r"`make (test-[a-z]+)`", " ".join(map(" ".join, rows()))))


def test_a_release_runs_what_is_kept():
    steps = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to release\n")[2]
    targets = re.findall(
        r"`make ([a-z-]+)`", " ".join(row[2] for row in rows() if row[1] == "kept")
    )
    assert len(targets) > 8
    assert set(targets) <= set(re.findall(r"`make ([a-z-]+)`", " ".join(steps.split())))
