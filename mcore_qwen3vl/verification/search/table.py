"""A table of all flags that reach a run: where each was tried, and whether the layouts agreed.

``python -m mcore_qwen3vl.verification.search --table flags.md --minutes 60`` adds lines to the file
until the time is up or all flags are tried; the same command goes on.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from textwrap import shorten

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.losses.registry import all_losses
from mcore_qwen3vl.verification.figures import write_figures
from mcore_qwen3vl.verification.search import records
from mcore_qwen3vl.verification.search.axes import flags_of
from mcore_qwen3vl.verification.search.case import Case, Flag
from mcore_qwen3vl.verification.search.comparing import end_of, same_result
from mcore_qwen3vl.verification.search.flags import WRITTEN, DrawnFlag, drawable
from mcore_qwen3vl.verification.search.oracles import (
    crashed,
    judge,
    remedy,
    single_rank,
)
from mcore_qwen3vl.verification.search.running import Bench

MODELS: dict[str, tuple[str, ...]] = {"dense": (), "MoE": ("--moe",)}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dense": ("tp2+sp", "pp2xdp2", "cp2"),
    "MoE": ("tp2+sp", "pp2xep2xdp2"),
}
_HEAD = """\
Each flag that reaches a run, alone. A value on one rank is *the same* as no flag, *another result*,
refused, or *not used*, as the run said too. In layouts it is one value, and the run is the first to
take the flag: `plain`, with experts (`MoE`), with an adapter (`LoRA`), with validations, packed, in
bf16, or with a loss. What is wrong is in bold.

| flag | in the contract | run | values on one rank | dense | MoE |
|---|---|---|---|---|---|
"""


def write_table(file: Path, bench: Bench, until: float, first: int = 0, every: int = 1) -> int:
    """Add lines to a file until a moment of the monotonic clock; return how many flags remain.

    Args:
        first, every: of all flags this process tries those from `first`, `every` apart.
    """
    if not file.exists():
        write_figures(file, "Flags, each alone", f"make search ARGS='--table {file}'", _HEAD)
    done = set(re.findall(r"^\| `(--\S+)` \|", file.read_text("utf-8"), re.MULTILINE))
    flags = sorted(drawable(), key=_is_written)
    waiting = [flag for flag in flags[first::every] if flag.name not in done]
    for number, flag in enumerate(waiting):
        if time.monotonic() > until:
            return len(waiting) - number
        # One write of a line, since several processes append.
        with file.open("a", encoding="utf-8") as stream:
            stream.write(f"| {' | '.join(_cells(bench, flag))} |\n")
        bench.keep([*bases().values(), *bases_of_losses().values()])
    return 0


@cache
def bases() -> dict[str, Case]:
    """Return the runs for adding a flag; a flag is tried on the first run that it does not stop.

    Each is of three steps: before the last one all parts of the model have changed.
    """
    makers = (records.one_image, records.several_turns, records.weights, records.one_image)
    rng = Random("records")
    lines = tuple(json.dumps(maker(rng), ensure_ascii=False) for maker in makers)
    plain = Case((), lines, (("--weight-decay", "10"),), steps=3)  # a small one is not seen
    return {
        "plain": plain,
        "MoE": replace(plain, model=MODELS["MoE"]),
        "LoRA": with_flag(plain, ("--lora-rank", "2")),
        "validates": replace(plain, validates=True),
        "packing": with_flag(plain, ("--packing",)),
        "bf16": with_flag(with_flag(plain, ("--bf16",)), ("--use-distributed-optimizer",)),
    }


@cache
def bases_of_losses() -> dict[str, Case]:
    """Return the runs to which a setting of a loss is added too: one with each loss."""
    rng, found = Random("losses"), {}
    for loss in all_losses():
        for name in loss.names:
            lines = records.lines(rng, records.makers_of(loss, name), 4, bad=False)
            batch = 4 if name == "kto" else 2
            found[name] = Case((), lines, flags_of(loss, name), batch=batch, steps=3)
    return found


def _cells(bench: Bench, flag: DrawnFlag) -> list[str]:
    """Return a line of the table: what each value does on one rank, and one value in each layout.

    In layouts, the value is the first that changes the result, or else the first to run.
    """
    name, base, effects = _tried(bench, flag)
    values = "; ".join(f"{' '.join(words) or 'given'}: {text}" for words, text in effects.items())
    ranked = [words for words in effects if effects[words] == _ANOTHER]
    ranked += [words for words in effects if effects[words] in (_SAME, _NOT_USED)]
    cells = [f"`{flag.name}`", flag.row.partition(":")[0][:60], name, values]
    for kind in MODELS:
        elsewhere = "--moe" in base.model and kind != "MoE"
        if not ranked or elsewhere or (kind == "MoE" and _is_written(flag)):
            cells.append("")
            continue
        case = with_flag(replace(base, model=MODELS[kind]), (flag.name, *ranked[0]))
        layouts = LAYOUTS[kind][1:2] if _is_written(flag) else LAYOUTS[kind]
        cells.append(_agreement(bench, case, layouts, f"{' '.join(ranked[0]) or 'given'}: "))
    return cells


def _is_written(flag: DrawnFlag) -> bool:
    """Return whether a flag says what is written beside a run, and nothing about the run."""
    return flag.row.startswith(WRITTEN)


def _values_of(flag: DrawnFlag) -> list[tuple[str, ...]]:
    """Return the values to try: no more than five, the first and the last among them."""
    *some, last = flag.values
    return [*some[:4], last]


_Try = tuple[str, Case, dict[tuple[str, ...], str]]
"""A run on which a flag was tried, by name and as it is, and what each value did."""


def _tried(bench: Bench, flag: DrawnFlag) -> _Try:
    """Return the run that says most of a flag.

    It is the first run where two values work, or where one value changes the result. If there is
    none, it is the run where most values work. A run that refuses values, or does not use them,
    says little.
    """
    tries: list[_Try] = []
    of_loss = flag.row.startswith("settings of the loss")
    for name, base in {**bases(), **(bases_of_losses() if of_loss else {})}.items():
        base = base.without(flag.name)
        effects = {words: _effect(bench, base, (flag.name, *words)) for words in _values_of(flag)}
        tries.append((name, base, effects))
        texts = list(effects.values())
        if _ANOTHER in texts or texts.count(_SAME) >= min(2, len(texts)):
            return tries[-1]
    return min(tries, key=_values_without_effect)


def _values_without_effect(one: _Try) -> int:
    """Return how many values a run refused or did not use."""
    _, _, effects = one
    return sum(text == _NOT_USED or text.startswith("refused") for text in effects.values())


def with_flag(case: Case, words: Flag) -> Case:
    """Return a case with one more flag, in place of one of the same name."""
    return replace(case, flags=(*case.without(words[0]).flags, words))


_SAME, _ANOTHER, _NOT_USED = "the same", "another result", "not used"


def _effect(bench: Bench, base: Case, words: Flag) -> str:
    """Return what a flag does to a run on one rank."""
    case = with_flag(base, words)
    outcome, verdict = judge(case, bench, (crashed, remedy))
    if verdict is not None:
        return f"**{_short(verdict.text)}**"
    if outcome.refusal:
        return f"refused: {_short(outcome.refusal)}"
    plain = bench.run(base)
    if not plain.finished:
        return f"only with it: {_short(end_of(plain))}"
    same = same_result(outcome, plain)
    if f"not used of the command line: {words[0]} " in outcome.ran[0].printed:
        return _NOT_USED if same else "**said to be not used, and another result**"
    return _SAME if same else _ANOTHER


def _agreement(bench: Bench, case: Case, layouts: Sequence[str], value: str) -> str:
    """Return whether a case's runs agree with a single rank in each layout."""
    agreed, others = [], []
    for layout in layouts:
        rows = int(case.value("--micro-batch-size")) * Layout.parse(layout).dp
        there = replace(case, layout=layout, batch=-(-case.batch // rows) * rows)
        outcome, verdict = judge(there, bench, (crashed, single_rank))
        if verdict is not None:
            others.append(f"**{layout}: {_short(verdict.text)}**")
        elif outcome.refusal:
            others.append(f"{layout} refused: {_short(outcome.refusal)}")
        else:
            agreed.append(layout)
    return value + "; ".join([*([f"{' '.join(agreed)} agree"] if agreed else []), *others])


def _short(text: str) -> str:
    """Return the beginning of a message, without the folder of its run."""
    return shorten(re.sub(r"\S*/runs/\d+/", "", text).replace("|", "/"), 90, placeholder=" …")
