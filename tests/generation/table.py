"""Print the token-for-token table, in Markdown: ``python -m tests.generation.table``."""

from __future__ import annotations

import sys

from mcore_qwen3vl.runtime import cpu

cpu.install()

from mcore_qwen3vl.console import quiet_libraries  # noqa: E402
from mcore_qwen3vl.generation import Generation  # noqa: E402
from mcore_qwen3vl.layout import Layout  # noqa: E402
from tests.generation.cases import KINDS, LAYOUTS, answer, conversations, expected  # noqa: E402


def main() -> int:
    quiet_libraries()
    print(f"| model | layout | {' | '.join(KINDS)} |")
    print("|---|---|" + "---|" * len(KINDS))
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
            print(f"| {model} | {name} | {' | '.join(cells)} |", flush=True)
        margins = (f"{want.margin:.0e}" for want in wants)
        print(f"| {model} | *smallest margin* | {' | '.join(margins)} |", flush=True)
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
