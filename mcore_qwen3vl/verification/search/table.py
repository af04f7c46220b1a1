"""A table of all flags that reach a run: where each was tried, and whether the layouts agreed.

``python -m mcore_qwen3vl.verification.search --table flags.md --minutes 60`` adds lines to the file
until the time is up or all flags are tried; the same command goes on.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from random import Random

from mcore_qwen3vl.verification.search import records
from mcore_qwen3vl.verification.search.case import Case, Flag
from mcore_qwen3vl.verification.search.comparing import same_result
from mcore_qwen3vl.verification.search.flags import DrawnFlag, drawable
from mcore_qwen3vl.verification.search.oracles import (
    crashed,
    judge,
    remedy,
    single_rank,
)
from mcore_qwen3vl.verification.search.running import Bench

MODELS: dict[str, tuple[str, ...]] = {"dense": (), "MoE": ("--moe",)}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dense": ("tp2+sp", "pp2", "cp2", "dp2"),
    "MoE": ("tp2+sp", "pp2", "ep2xdp2"),
}
_HEAD = (
    "| flag | in the contract | values on one rank | dense | MoE |\n"
    "|---|---|---|---|---|\n"
)  # fmt: skip


def write_table(file: Path, bench: Bench, until: float, first: int = 0, every: int = 1) -> int:
    """Add lines to a file until a moment of the monotonic clock; return how many flags remain.

    Args:
        first, every: of all flags this process tries those from `first`, `every` apart.
    """
    if not file.exists():
        file.write_text(_HEAD, "utf-8")
    done = {line.split("|")[1].strip() for line in file.read_text("utf-8").splitlines()}
    waiting = [flag for flag in drawable()[first::every] if f"`{flag.name}`" not in done]
    for number, flag in enumerate(waiting):
        if time.monotonic() > until:
            return len(waiting) - number
        # One write of a line, since several processes append.
        with file.open("a", encoding="utf-8") as stream:
            stream.write(f"| {' | '.join(_cells(bench, flag))} |\n")
    return 0


def base(kind: str) -> Case:
    """Return the run to which a flag is added: two steps on pictures and texts."""
    makers = (records.one_image, records.several_turns, records.weights)
    return Case(MODELS[kind], records.lines(Random(kind), makers, 4, bad=False))


def _cells(bench: Bench, flag: DrawnFlag) -> list[str]:
    """Return a line of the table: what each value does on one rank, and one value in each layout.

    In layouts, that is the first value that changes the result, or else the first that runs.
    """
    effects = {words: _effect(bench, (flag.name, *words)) for words in flag.values}
    values = "; ".join(f"{' '.join(words) or 'given'}: {text}" for words, text in effects.items())
    ranked = [words for words in effects if effects[words] == _ANOTHER]
    ranked += [words for words in effects if effects[words] in (_SAME, _NOT_USED)]
    cells = [f"`{flag.name}`", flag.row.partition(":")[0][:60], values]
    for kind in MODELS:
        cells.append(_agreement(bench, kind, (flag.name, *ranked[0])) if ranked else "")
    return cells


_SAME, _ANOTHER, _NOT_USED = "the same", "another result", "not used"


def _effect(bench: Bench, words: Flag) -> str:
    """Return what a flag does to a run of the dense model on one rank."""
    plain = base("dense")
    case = replace(plain, flags=(words,))
    outcome, verdict = judge(case, bench, (crashed, remedy))
    if verdict is not None:
        return f"**{_short(verdict.text)}**"
    if outcome.refusal:
        return f"refused: {_short(outcome.refusal)}"
    same = same_result(outcome, bench.run(plain))
    if f"not used of the command line: {words[0]} " in outcome.ran[0].printed:
        return _NOT_USED if same else "**said to be not used, and another result**"
    return _SAME if same else _ANOTHER


def _agreement(bench: Bench, kind: str, words: Flag) -> str:
    """Return whether a flag's runs agree with a single rank in each layout of a model."""
    agreed, others = [], []
    case = replace(base(kind), flags=(words,))
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
    with_value = f"{' '.join(words[1:]) or 'given'}: "
    return with_value + "; ".join([*([f"{' '.join(agreed)} agree"] if agreed else []), *others])


def _short(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:90]
