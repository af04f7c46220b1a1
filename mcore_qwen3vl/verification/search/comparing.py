"""What the oracles compare: how close two runs have to be, and where they differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mcore_qwen3vl.runtime.launch import RanksFailed, run_layout
from mcore_qwen3vl.verification.runs import LOGGED, LOGGED_IN_HALF, kind_of
from mcore_qwen3vl.verification.search import plain
from mcore_qwen3vl.verification.search.case import Case
from mcore_qwen3vl.verification.search.running import Bench, Outcome

LIMITS, HALF = LOGGED, LOGGED_IN_HALF
AGAIN = {"loss": 2e-6, "grad norm": 3e-5, "rate": 0.0}
"""`LIMITS` where the same is computed once more: some products round otherwise by where in memory
their operands lie, and a run's other flags move them."""


@dataclass(frozen=True)
class ByDesign:
    """A difference that is no fault.

    Attributes:
        text: why two runs differ.
        page: the page of docs/ that says so, and words on it.
    """

    text: str
    page: tuple[str, str]


TOKEN_LOSSES = ("cross_entropy", "weighted_cross_entropy", "scaled_cross_entropy")
OF_SUMS = {**LIMITS, "loss": 1e-4}
"""`LIMITS` of losses of a sample's summed log-probabilities: they carry the rounding of all of its
tokens, where a mean over tokens carries one's. DPO's after two steps was found 1.1e-5 apart between
one rank and two pipeline stages, and 2.7e-5 between TP and the plain loop. A task's loss divides
similarities by a temperature: InfoNCE's after three steps was found 2.3e-5 apart between one rank
and TP, with a tenth of the learning rate 6e-7."""
HALF_OF_SUMS = {**HALF, "loss": 1e-1}
"""A DPO loss of 0.022 was found 3 % apart in bf16, between one rank and CP: that is 0.03 in the
margin of log-probabilities, and each of these is rounded to 8 bits."""


def limits_of(case: Case) -> Mapping[str, float]:
    of_tokens = case.value("--loss", "cross_entropy") in TOKEN_LOSSES and not case.has("--task")
    if is_half(case):
        return HALF if of_tokens else HALF_OF_SUMS
    return LIMITS if of_tokens else OF_SUMS


def limits_again(case: Case) -> Mapping[str, float]:
    """Return the limits where the same is computed once more."""
    return limits_of(case) if is_half(case) else AGAIN


def is_half(case: Case) -> bool:
    return case.has("--bf16") or case.has("--fp16")


def differences(one: Outcome, other: Outcome, limits: Mapping[str, float], name: str) -> str:
    """Return where the samples or the logs of two runs differ; nothing if they agree."""
    mine, theirs = one.log, other.log
    if mine.keys() != theirs.keys():
        return f"it has the steps {sorted(mine)}, and {name} {sorted(theirs)}"
    for step in sorted(mine):
        if one.names(step) != other.names(step):
            return (
                f"step {step} trained on {dict(one.names(step))}, "
                f"and {name} on {dict(other.names(step))}"
            )
        for key in sorted(mine[step].keys() & theirs[step].keys()):
            kind = kind_of(key)
            if kind is None:
                continue
            a, b = mine[step][key], theirs[step][key]
            if not agree(a, b, limits[kind], least_of(key)):
                return f"step {step}: {key} is {a}, and {b} in {name}"
    mine, theirs = validations(one), validations(other)
    for step in sorted(mine.keys() & theirs.keys()):
        for key in sorted(mine[step].keys() & theirs[step].keys()):
            a, b = mine[step][key], theirs[step][key]
            if not agree(a, b, limits["loss"], least_of(key)):
                return f"step {step}: {key} is {a}, and {b} in {name}"
    return ""


NEAR_EQUAL_EXPERTS = ByDesign(
    "rounding decides which expert a token gets where two of them have nearly the same score",
    ("training.md", "Where two experts have nearly the same score, rounding decides"),
)
_NUDGES = (1 - 1e-6, 1 + 1e-6, 1 - 1e-5, 1 + 1e-5)
"""Factors of a learning rate that move weights by what rounding moves them, and a little more."""


def compare_nudged(
    case: Case,
    limits: Mapping[str, float],
    compare_at: Callable[[float, Mapping[str, float]], str | None],
) -> str | None:
    """Return where a run differs from a reference; nothing if they agree.

    With experts, they agree if the reference does so under one of four learning rates that are
    nearly its own: then their difference is :data:`NEAR_EQUAL_EXPERTS`, since so small a factor
    changes nothing else beyond the limits.

    Args:
        case: that of the reference.
        compare_at: compares with the reference, whose learning rate is multiplied by the factor,
            within limits; None if it does not know the case.
    """
    found = compare_at(1.0, limits)
    if not found or not case.is_moe:
        return found
    for factor in _NUDGES:
        if compare_at(factor, {**limits, "rate": 2 * abs(factor - 1)}) == "":
            return ""
    return found


def compare(
    outcome: Outcome, other: Case, bench: Bench, limits: Mapping[str, float], name: str
) -> str:
    """Return where a run differs from that of another case; nothing if they agree."""

    def compare_at(factor: float, limits: Mapping[str, float]) -> str:
        return differences(outcome, bench.run(_nudged(other, factor)), limits, name)

    return compare_nudged(other, limits, compare_at) or ""


def _nudged(case: Case, factor: float) -> Case:
    if factor == 1:
        return case
    rate = ("--lr", repr(float(case.value("--lr")) * factor))
    return replace(case, flags=(*case.without("--lr").flags, rate))


def same_result(one: Outcome, other: Outcome) -> bool:
    """Return whether two runs logged the same, but for its last digits."""
    return differences(one, other, AGAIN, "") == ""


def validations(outcome: Outcome) -> dict[int, dict[str, float]]:
    """Return the numbers of each validation by its step; a repeated one has the later numbers."""
    entries = [entry for one in outcome.ran for entry in one.validations]
    return {
        int(entry["iteration"]): {k: v for k, v in entry.items() if k.startswith("valid")}
        for entry in entries
    }


def least_of(name: str) -> float:
    """Return the size below which a logged number's difference counts as if it had that size.

    Rewards, and preference losses, are made of differences of log-probabilities. Each
    log-probability is rounded by a part of itself, whatever is left of it in the difference. A
    SimPO loss was found 2.5e-5 apart from the plain loop's where the first step had brought it
    from 7.5 to 0.2, and 2.4e-6 with an epsilon of Adam with which small gradients take small steps.
    """
    return 1.0 if "rewards" in name or name.removeprefix("validation ") in _PREFERENCES else 1e-3


_PREFERENCES = ("dpo loss", "simpo loss", "orpo loss", "kto loss", "reward loss")


def agree(a: Any, b: Any, limit: float, least: float = 1e-3) -> bool:
    """Return whether two numbers differ by at most `limit` of the larger one, or of `least`."""
    if a is None or b is None:
        return bool(a == b)
    if not (math.isfinite(a) and math.isfinite(b)):
        return False
    return abs(a - b) <= limit * max(abs(a), abs(b), least)


def end_of(outcome: Outcome) -> str:
    return outcome.refusal or last_line(outcome.ran[-1].crash)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Failed)\b", line)]
    return (named or lines or [""])[-1][:300]


def compute_plainly[T](bench: Bench, compute: Callable[..., T], *args: Any) -> T | None:
    """Compute in a fork with one of :mod:`.plain`'s functions; None for what it does not know."""
    try:
        (found,) = run_layout(compute, 1, *args, timeout=bench.timeout)
    except RanksFailed as error:
        if plain.NotPlain.__name__ in str(error):
            return None
        raise
    return found


def image_budget(case: Case) -> plain.ImageBudget:
    """Return the budget of images that the case's flags give."""
    names = ("min-pixels", "max-pixels", "max-tokens")
    values = (int(case.value(f"--image-{name}", "0")) or None for name in names)
    return plain.ImageBudget(*values)


def cuts_records(case: Case) -> bool:
    return case.value("--overlong") == "truncate"
