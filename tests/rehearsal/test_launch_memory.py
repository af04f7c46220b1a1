"""The rows of the page about the launch scripts go into the table of their section."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import launch_memory

PAGE = """# Page

## Seconds of a step

| script | s |
|---|---|
| `a` | 1 |

## Roles, torch spec

Words.

| script | role |
|---|---|
| a | first |
| a | last |
| c | every |

## Others

| script | GPUs |
|---|---|
| `a` | 2 |
| `b` | 3 |
"""


@pytest.mark.parametrize(
    ("heading", "name", "lines", "before", "after"),
    [
        ("## Seconds of a step", "`a`", ["| `a` | 9 |\n"], "| `a` | 1 |\n", "| `a` | 9 |\n"),
        (
            "## Seconds of a step", "`b`", ["| `b` | 9 |\n"],
            "| `a` | 1 |\n", "| `a` | 1 |\n| `b` | 9 |\n",
        ),
        (
            "## Roles, torch spec", "a", ["| a | every |\n"],
            "| a | first |\n| a | last |\n", "| a | every |\n",
        ),
        (
            "## Others", "`c`", ["| `c` | 4 |\n"],
            "| `b` | 3 |\n", "| `b` | 3 |\n| `c` | 4 |\n",
        ),
    ],
)  # fmt: skip
def test_rows_go_into_the_table_of_their_section(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heading: str,
    name: str,
    lines: list[str],
    before: str,
    after: str,
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(launch_memory, "PAGE", page)
    launch_memory.write_rows(heading, name, lines)
    assert page.read_text() == PAGE.replace(before, after, 1)
