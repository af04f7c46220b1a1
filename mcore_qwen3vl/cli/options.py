"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from mcore_qwen3vl.errors import CheckFailed

Force = Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result as JSON to FILE; - is stdout.")
]
ReportFolder = Annotated[
    Path | None, typer.Option("--report", help="Write report.json and report.html to this folder.")
]
Size = Annotated[int, typer.Option(min=1, help="Parallel size.")]
Workers = Annotated[
    int | None, typer.Option(help="Parallel workers; the default suits the machine.")
]


def require(held: bool, otherwise: str) -> None:
    """Exit with code 1 and a message unless a check held."""
    if not held:
        raise CheckFailed(otherwise)
