"""Print the token-for-token table, in Markdown: ``python -m tests.generation.table``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mcore_qwen3vl.runtime import cpu

cpu.install()

from mcore_qwen3vl.console import quiet_libraries  # noqa: E402
from mcore_qwen3vl.generation.generate import Generation  # noqa: E402
from mcore_qwen3vl.layout import Layout  # noqa: E402
from mcore_qwen3vl.verification.figures import write_figures  # noqa: E402
from tests.generation.cases import KINDS, LAYOUTS, answer, conversations, expected  # noqa: E402

CELLS = """Equal tokens of all tokens, greedy, in float32, on tiny models. `batch` is four prompts
of different lengths. The logits of the two models differ by about 1e-5."""


def main() -> int:
    """Print a row for each layout, and return 1 if a token is another one."""
    parser = argparse.ArgumentParser(prog="python -m tests.generation.table", description=__doc__)
    parser.add_argument("--page", type=Path, help="write the figures as a page of Markdown")
    arguments = parser.parse_args()
    quiet_libraries()
    lines = [f"| model | layout | {' | '.join(KINDS)} |", "|---|---|" + "---|" * len(KINDS)]
    wrong = 0
    for model, layouts in LAYOUTS.items():
        wants = [expected(model, kind) for kind in KINDS]
        totals = [sum(map(len, want.tokens)) for want in wants]
        batches = [conversations(kind) for kind in KINDS]
        for name in layouts:
            ranks = answer(model, batches, Layout.parse(name))
            equal = [
                min(_equal(want.tokens, rank[number]) for rank in ranks)
                for number, want in enumerate(wants)
            ]
            wrong += equal != totals
            cells = (f"{n} / {total}" for n, total in zip(equal, totals, strict=True))
            lines.append(f"| {model} | {name} | {' | '.join(cells)} |")
        margins = (f"{want.margin:.0e}" for want in wants)
        lines.append(f"| {model} | *smallest margin* | {' | '.join(margins)} |")
    table = "\n".join(lines)
    print(table)
    if arguments.page:
        title = "Greedy answers beside Hugging Face's"
        write_figures(arguments.page, title, parser.prog, f"{CELLS}\n\n{table}")
    return int(wrong > 0)


def _equal(want: list[list[int]], answers: list[Generation]) -> int:
    """Count the tokens that agree, up to the end of the shorter answer."""
    return sum(
        a == b
        for row, generation in zip(want, answers, strict=True)
        for a, b in zip(row, generation.token_ids, strict=False)
    )


if __name__ == "__main__":
    sys.exit(main())
