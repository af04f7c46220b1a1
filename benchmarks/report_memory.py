"""Memory of the report of `data check`, which grows with the number of samples.

    python benchmarks/report_memory.py [--page docs/measurements/data_check.md]

The report is made of the values that a part's result has for each sample, as `--merge` makes it.
Memory is what Python's allocator holds (``tracemalloc``), without the libraries' own.
"""

from __future__ import annotations

import argparse
import json
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

from mcore_qwen3vl.console import emit_json
from mcore_qwen3vl.data.inspection import DataReport, Finding, Fold
from mcore_qwen3vl.data.sizes import Size
from mcore_qwen3vl.verification.figures import write_figures

COUNTS = (1_000, 10_000, 100_000)


def findings(count: int) -> Iterator[list[Any]]:
    """Yield what is found in usable samples, one in two of them with an image."""
    for number in range(count):
        patches = 300 + number % 900 if number % 2 else 0
        size = Size(1000 + number % 7000, patches, float(patches**2))
        finding = Finding(
            f"train.jsonl:{number + 1}", "messages", size=size, trained=300 + number % 700
        )
        yield json.loads(json.dumps(finding.values()))


def bytes_of_a_sample(count: int) -> tuple[float, float]:
    """Return the bytes for each sample: of the report, and at the peak while it becomes JSON."""
    tracemalloc.start()
    report = DataReport(Path("train.jsonl"), 8192)
    fold = Fold(report, [])
    for values in findings(count):
        fold.add(Finding.from_values(values))
    held, _ = tracemalloc.get_traced_memory()
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        emit_json({field.name: getattr(report, field.name) for field in fields(report)})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / count, peak / count


def main() -> None:
    """Measure, print a table, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, help="write the page of figures here")
    args = parser.parse_args()
    lines = ["| samples | bytes a sample | at the peak, with `--json` |", "|---:|---:|---:|"]
    for count in COUNTS:
        held, peak = bytes_of_a_sample(count)
        lines.append(f"| {count:,} | {held:,.0f} | {peak:,.0f} |")
    table = "\n".join(lines)
    print(table)
    if args.page is not None:
        command = "python benchmarks/report_memory.py --page docs/measurements/data_check.md"
        write_figures(args.page, "Memory of the report of data check", command, _ABOUT + table)


_ABOUT = """Memory for each usable sample in the process that reports, and not in those that read.
Names of samples with a flaw, a peculiarity or an unused key come on top.

"""


if __name__ == "__main__":
    main()
