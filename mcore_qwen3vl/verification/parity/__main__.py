"""``python -m mcore_qwen3vl.verification.parity``: run the layout matrix and write its table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from mcore_qwen3vl.console import quiet_libraries
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.verification.figures import write_figures
from mcore_qwen3vl.verification.parity.matrix import (
    CELLS,
    LORA_MATRIX,
    MATRIX,
    MatrixRow,
    markdown,
    parity_matrix,
)
from mcore_qwen3vl.verification.report import Report


def main() -> int:
    """Run the matrix, and return 0 if everything is equal, 1 if something is not."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_qwen3vl.verification.parity", description=__doc__
    )
    parser.add_argument("--page", type=Path, help="write the figures as a page of Markdown")
    parser.add_argument("--json", type=Path, help="write every finding")
    parser.add_argument("--only", default="", help="rows whose description contains this")
    arguments = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)  # the models are tiny: more threads would only wait for each other
    rows = [row for row in (*MATRIX, *LORA_MATRIX) if arguments.only in str(row)]
    started = time.monotonic()
    with scratch_folder("mcore-qwen3vl-parity-") as folder:
        results = parity_matrix(folder, rows, print_row)
    if arguments.page:
        tables = f"{CELLS}\n\n{markdown(results)}"
        only = f""" ARGS='--only "{arguments.only}"'""" if arguments.only else ""
        write_figures(arguments.page, "Parity with Hugging Face", f"make parity{only}", tables)
    if arguments.json:
        reports = [report.to_dict() for _, report in results]
        arguments.json.write_text(json.dumps(reports, default=str), encoding="utf-8")
    failed = [row for row, report in results if not report.ok]
    print(
        f"{len(results) - len(failed)} of {len(results)} rows equal Hugging Face "
        f"({time.monotonic() - started:.0f} s)",
        file=sys.stderr,
    )
    return 1 if failed or not results else 0


def print_row(row: MatrixRow, report: Report) -> None:
    """Print a row's worst error of each part over all batches, and its first failures."""
    worst: dict[str, float] = {}
    for summary in report.parts().values():
        worst[summary.part] = max(worst.get(summary.part, 0.0), summary.worst.relative_error)
    errors = ", ".join(f"{part} {error:.1e}" for part, error in worst.items())
    print(f"{'ok' if report.ok else 'WRONG':6}{row!s:56}{errors}", flush=True)
    for failure in report.failures[:5]:
        print(f"      {failure}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
