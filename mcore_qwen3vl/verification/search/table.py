"""A table of all flags that reach a run: where each was tried, and whether the layouts agreed.

``python -m mcore_qwen3vl.verification.search --table flags.md --minutes 60`` adds lines to the file
until the time is up or all flags are tried; the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from mcore_qwen3vl.verification.search import records
from mcore_qwen3vl.verification.search.case import Case, Flag
from mcore_qwen3vl.verification.search.flags import DrawnFlag, drawable
from mcore_qwen3vl.verification.search.oracles import (
    crashed,
    judge,
    remedy,
    same_result,
    single_rank,
)
from mcore_qwen3vl.verification.search.running import Bench

MODELS: dict[str, tuple[str, ...]] = {"dense": (), "MoE": ("--moe",)}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dense": ("tp2+sp", "pp2", "cp2", "dp2"),
    "MoE": ("tp2+sp", "pp2", "ep2xdp2"),
}
_HEAD = (
    "| flag | in the contract | dense | MoE |\n"
    "|---|---|---|---|\n"
)  # fmt: skip


def write_table(file: Path, bench: Bench, until: float, first: int = 0, every: int = 1) -> int:
    """Add lines to a file until a moment of the monotonic clock; return how many remain.

    Args:
        first, every: of all values this process tries those from `first`, `every` apart.
    """
    if not file.exists():
        file.write_text(_HEAD, "utf-8")
    done = {line.split("|")[1].strip() for line in file.read_text("utf-8").splitlines()}
    waiting = [one for one in list(_values())[first::every] if f"`{' '.join(one[1])}`" not in done]
    for number, (flag, words) in enumerate(waiting):
        if time.monotonic() > until:
            return len(waiting) - number
        cells = [_cell(bench, kind, words) for kind in MODELS]
        # One write of a line, since several processes append.
        with file.open("a", encoding="utf-8") as stream:
            where = flag.row.partition(":")[0][:60]
            stream.write(f"| `{' '.join(words)}` | {where} | {' | '.join(cells)} |\n")
    return 0


def _values() -> Iterator[tuple[DrawnFlag, Flag]]:
    """Yield each flag with each of its values."""
    for flag in drawable():
        for values in flag.values:
            yield flag, (flag.name, *values)


def base(kind: str) -> Case:
    """Return the run to which a flag is added: two steps on pictures and texts."""
    makers = (records.one_image, records.several_turns, records.weights)
    return Case(MODELS[kind], records.lines(Random(kind), makers, 4, bad=False))


def _cell(bench: Bench, kind: str, words: Flag) -> str:
    """Return what a flag does to a model: on one rank, and whether each layout agrees."""
    plain = base(kind)
    case = replace(plain, flags=(words,))
    outcome, verdict = judge(case, bench, (crashed, remedy))
    if verdict is not None:
        return f"**{_short(verdict.text)}**"
    if outcome.refusal:
        return f"refused: {_short(outcome.refusal)}"
    same = same_result(outcome, bench.run(plain))
    named = f"not used of the command line: {words[0]} " in outcome.ran[0].printed
    effect = "not used" if named else "the same" if same else "another result"
    if named and not same:
        effect = "**said to be not used, and another result**"
    agreed, others = [], []
    for layout in LAYOUTS[kind]:
        there = replace(case, layout=layout)
        outcome, verdict = judge(there, bench, (crashed, single_rank))
        if verdict is not None:
            others.append(f"**{layout}: {_short(verdict.text)}**")
        elif outcome.refusal:
            others.append(f"{layout} refused: {_short(outcome.refusal)}")
        else:
            agreed.append(layout)
    bench.forget(case)
    return "; ".join([effect, *([f"{' '.join(agreed)} agree"] if agreed else []), *others])


def _short(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:90]
