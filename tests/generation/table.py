"""Print the token-for-token table: ``python -m tests.generation.table``."""

from __future__ import annotations

import sys

from mcore_qwen3vl.runtime import cpu

cpu.install()

from mcore_qwen3vl.generation import Generation  # noqa: E402
from mcore_qwen3vl.runtime.parallel import Layout  # noqa: E402
from tests.generation.cases import KINDS, answer, conversations, expected  # noqa: E402

LAYOUTS = {
    False: ("single", "tp2", "tp2+sp", "pp2", "pp4"),
    True: ("single", "tp2+sp", "pp2", "ep2xdp2"),
}


def main() -> int:
    print(f"{'model':6} {'layout':8} {'prompt':12} {'equal tokens':>13}  smallest margin")
    wrong = 0
    for moe, layouts in LAYOUTS.items():
        wants = [expected(moe, kind) for kind in KINDS]
        batches = [conversations(kind) for kind in KINDS]
        for name in layouts:
            ranks = answer(moe, batches, Layout.parse(name))
            for number, (kind, want) in enumerate(zip(KINDS, wants, strict=True)):
                total = sum(map(len, want.tokens))
                equal = min(_equal(want.tokens, rank[number]) for rank in ranks)
                wrong += equal != total
                model = "MoE" if moe else "dense"
                print(f"{model:6} {name:8} {kind:12} {equal:6} / {total:<4}  {want.margin:.1e}")
    return int(wrong > 0)


def _equal(want: list[list[int]], answers: list[Generation]) -> int:
    """Tokens that agree, those of a longer or shorter answer not counted."""
    return sum(
        a == b
        for row, generation in zip(want, answers, strict=True)
        for a, b in zip(row, generation.token_ids, strict=False)
    )


if __name__ == "__main__":
    sys.exit(main())
