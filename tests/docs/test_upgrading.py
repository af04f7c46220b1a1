"""docs/upgrading.md says what to do for each canary, and names tests and tables that exist."""

from __future__ import annotations

import re

from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs" / "upgrading.md").read_text()
SOURCES = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))


def test_every_canary_is_explained():
    canaries = set(re.findall(r"^def (test_canary_\w+)", SOURCES, re.MULTILINE))
    assert len(canaries) > 6
    assert canaries <= set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))


def test_every_test_that_it_names_exists():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 15
    assert named <= set(re.findall(r"^def (test_\w+)", SOURCES, re.MULTILINE))
