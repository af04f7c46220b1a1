"""``python -m tests.model.te.table``: run the ``te`` spec's matrix and write the worst errors."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from mcore_qwen3vl.console import quiet_libraries
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.verification.figures import write_figures
from mcore_qwen3vl.verification.parity.__main__ import print_row
from mcore_qwen3vl.verification.parity.matrix import MatrixRow, parity_matrix
from mcore_qwen3vl.verification.report import Report
from tests.model.te import extension

PARTS = ("logits", "loss", "gradients", "parameters")
CELLS = "Worst error over each kind of layout, in units of 1e-6. The limit is 20 in float32."
SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")


def main() -> int:
    """Return exit code 0 if every row equals Hugging Face, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.te.table", description=__doc__)
    parser.add_argument("--page", type=Path, help="write the figures as a page of Markdown")
    parser.add_argument("--only", default="", help="rows whose description contains this")
    arguments = parser.parse_args()
    extension.install()
    cpu.install()
    quiet_libraries()
    torch.set_num_threads(1)
    from tests.model.te import device
    from tests.model.te.rows import LORA_ROWS, ROWS

    device.install()
    rows = [row for row in (*ROWS, *LORA_ROWS) if arguments.only in str(row)]
    with tempfile.TemporaryDirectory(prefix="mcore-qwen3vl-te-") as folder:
        results = parity_matrix(Path(folder), rows, print_row)
    if arguments.page:
        table = "\n".join(summary(results))
        write_figures(arguments.page, "Parity of the te spec", parser.prog, f"{CELLS}\n\n{table}")
    failed = [row for row, report in results if not report.ok]
    print(f"{len(results) - len(failed)} of {len(results)} rows equal Hugging Face")
    return 1 if failed or not results else 0


def summary(results: Sequence[tuple[MatrixRow, Report]]) -> Iterable[str]:
    """Yield a Markdown table: a line for each kind of rows, with worst errors in units of 1e-6."""
    kinds: dict[str, list[tuple[MatrixRow, Report]]] = {}
    for row, report in results:
        kinds.setdefault(_kind(row), []).append((row, report))
    yield "| | rows | logits | loss | gradients | after a step |"
    yield "|---|---|---|---|---|---|"
    for kind, members in kinds.items():
        errors = [
            max(
                (f.relative_error for _, r in members for f in r.findings if f.part == part),
                default=None,
            )
            for part in PARTS
        ]
        cells = ["" if error is None else f"{error * 1e6:.3g}" for error in errors]
        yield f"| {kind} | {len(members)} | {' | '.join(cells)} |"


def _kind(row: MatrixRow) -> str:
    family = "MoE" if row.model.startswith("moe") else "dense"
    layout = Layout.parse(row.layout)
    named = {"bf16": "bf16", "recompute": "recompute", "frozen": "frozen parts"}
    special = next((kind for word, kind in named.items() if word in row.note), "")
    if row.lora:
        return f"{family}, LoRA"
    if special:
        return f"{family}, {special}"
    sizes = [name.upper() for name in SIZES if getattr(layout, name) > 1]
    return f"{family}, {' + '.join(sizes) or 'one rank'}"


if __name__ == "__main__":
    sys.exit(main())
