"""Our loop compared with a plain Hugging Face loop, on the same samples in the same order.

python -m mcore_qwen3vl.verify.curves            # the table: layouts x {dense, MoE}
python -m mcore_qwen3vl.verify.curves --resume   # runs stopped halfway, against full runs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mcore_qwen3vl.console import quiet_libraries
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.verify.curves.tables import curves_table, resume_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, and return 1 if a difference exceeds the tolerance."""
    parser = argparse.ArgumentParser(
        prog="python -m mcore_qwen3vl.verify.curves",
        description="Training curves against Hugging Face, on the CPU",
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", help="rows whose name contains one of these words")
    parser.add_argument("--resume", action="store_true", help="the table of resumed runs instead")
    options = parser.parse_args(arguments)
    quiet_libraries()
    with scratch_folder() as folder:
        if options.resume:
            return resume_table(folder, options.steps)
        return curves_table(folder, options.steps, options.only)


if __name__ == "__main__":
    sys.exit(main())
