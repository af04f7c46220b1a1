"""Pages of measured figures, which ``docs/measurements`` keeps: a program writes its own page.

Guides say what to do and what is proven. Figures age with the commit and the machine that gave
them, so each page begins with both.
"""

from __future__ import annotations

import subprocess
from datetime import date
from pathlib import Path

from mcore_qwen3vl.files import atomic_write
from mcore_qwen3vl.verification.report import environment


def write_figures(file: Path, title: str, command: str, tables: str, **others: str) -> None:
    """Write a page of figures in Markdown.

    Args:
        file: replaced if it exists.
        command: prints these figures again.
        tables: the figures.
        others: what else they depend on, such as the GPU.

    Raises:
        BadInput: `file` cannot be written.
    """
    versions = ", ".join(
        f"{name} {value}" for name, value in environment().items() if name != "machine"
    )
    facts = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": environment()["machine"],
        "versions": versions,
        **others,
        "command": f"`{command}`",
    }
    rows = [f"| {name} | {value} |" for name, value in facts.items()]
    page = [f"# {title}", "", "| | |", "|---|---|", *rows, "", tables.strip()]
    with atomic_write(file, "Choose another file.") as partial:
        partial.write_text("\n".join(page) + "\n", encoding="utf-8")


def commit() -> str:
    """Return the commit of this package's checkout, with a note if files differ from it."""
    folder = Path(__file__).parent
    shown = subprocess.run(
        ["git", "describe", "--always", "--dirty=, with changes", "--exclude=*"],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return shown.stdout.strip() or "not a checkout"
