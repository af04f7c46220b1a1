"""``mcore-qwen3vl verify manifest``."""

from pathlib import Path
from typing import Annotated

import typer

from mcore_qwen3vl import console
from mcore_qwen3vl.cli.options import Json, ReportFolder, Workers, conclude


def verify_manifest(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="Checkpoint that convert hf-to-mcore wrote.")
    ],
    workers: Workers = None,
    report: ReportFolder = None,
    json: Json = False,
) -> None:
    """Compare every tensor with the checksums in DIR/manifest.json, without the source."""
    from mcore_qwen3vl.verify.checkpoints.manifest_check import check_manifest

    with console.byte_progress("checking") as progress:
        checked = check_manifest(path, workers=workers, progress=progress)
    conclude(checked, report, json)
