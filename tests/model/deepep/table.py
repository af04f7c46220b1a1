"""``python -m tests.model.deepep.table``: write the table of the flex dispatcher."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from mcore_qwen3vl.console import quiet_libraries
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.verification.figures import write_figures
from mcore_qwen3vl.verification.parity.__main__ import print_row
from mcore_qwen3vl.verification.parity.matrix import CELLS, markdown, parity_matrix


def main() -> int:
    """Return exit code 0 if every row equals Hugging Face, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.deepep.table", description=__doc__)
    parser.add_argument("--page", type=Path, help="write the figures as a page of Markdown")
    parser.add_argument("--only", default="", help="rows whose description contains this")
    arguments = parser.parse_args()
    cpu.install()
    quiet_libraries()
    torch.set_num_threads(1)
    from tests.model.deepep.installed import installed
    from tests.model.deepep.rows import ROWS

    rows = [row for row in ROWS if arguments.only in str(row)]
    with tempfile.TemporaryDirectory(prefix="mcore-qwen3vl-deepep-") as folder, installed():
        results = parity_matrix(Path(folder), rows, print_row)
    if arguments.page:
        title = "Parity with the DeepEP and HybridEP dispatchers"
        tables = f"{CELLS}\n\n{markdown(results)}"
        write_figures(arguments.page, title, parser.prog, tables)
    return 0 if results and all(report.ok for _, report in results) else 1


if __name__ == "__main__":
    sys.exit(main())
