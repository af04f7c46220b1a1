"""Makes a failing case smaller, as long as the same oracle finds the same wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verification.search.case import Case

SIMPLEST = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}


def shrink(case: Case, still_fails: Callable[[Case], bool], seconds: float) -> Case:
    """Return the smallest case found in that time for which `still_fails` holds."""
    deadline, tried = time.monotonic() + seconds, {case}
    smaller = True
    while smaller:
        smaller = False
        for candidate in smaller_cases(case):
            if time.monotonic() > deadline:
                return case
            if candidate in tried:
                continue
            tried.add(candidate)
            if still_fails(candidate):
                case, smaller = candidate, True
                break
    return case


def smaller_cases(case: Case) -> Iterator[Case]:
    """Yield cases that are simpler in one respect, with the largest omission first."""
    yield from _with_less_of_a_stop(case)
    if case.validates:
        yield replace(case, validates=False)
    for index in range(len(case.flags)):
        yield replace(case, flags=case.flags[:index] + case.flags[index + 1 :])
    if case.model:
        yield replace(case, model=())
        for index, word in enumerate(case.model):
            if word in ("--moe", "--tie"):
                yield replace(case, model=case.model[:index] + case.model[index + 1 :])
    yield from _with_smaller_layouts(case)
    if case.steps > 1:
        yield replace(case, steps=1)
        yield replace(case, steps=case.steps - 1)
    if case.batch > 1:
        yield replace(case, batch=case.batch // 2)
    yield from _with_fewer_records(case)
    yield from _with_simpler_records(case)


def _with_less_of_a_stop(case: Case) -> Iterator[Case]:
    stop = case.stop
    if stop is None:
        return
    yield replace(case, stop=None)
    if stop.layout is not None:
        yield replace(case, stop=replace(stop, layout=None))
        for one in _smaller_layouts(stop.layout):
            yield replace(case, stop=replace(stop, layout=one))
    for index in range(len(stop.flags)):
        left = stop.flags[:index] + stop.flags[index + 1 :]
        yield replace(case, stop=replace(stop, flags=left))
    if stop.how != "saved":
        yield replace(case, stop=replace(stop, how="saved"))
    if stop.after > 1:
        yield replace(case, stop=replace(stop, after=1))


def _with_smaller_layouts(case: Case) -> Iterator[Case]:
    for one in _smaller_layouts(case.layout):
        yield replace(case, layout=one)


def _smaller_layouts(text: str) -> Iterator[str]:
    """Yield the single rank, and then the layout with one of its sizes set to 1."""
    layout = Layout.parse(text)
    if str(layout) != "single":
        yield "single"
    if layout.sp:
        yield str(replace(layout, sp=False))
    for name in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp"):
        if getattr(layout, name) > 1:
            one: dict[str, Any] = {name: 1}
            smaller = replace(layout, **one)
            yield str(replace(smaller, sp=smaller.sp and smaller.tp > 1))


def _with_fewer_records(case: Case) -> Iterator[Case]:
    count = len(case.records)
    if count > 1:
        yield replace(case, records=case.records[: count // 2])
        yield replace(case, records=case.records[count // 2 :])
        for index in range(count):
            yield replace(case, records=case.records[:index] + case.records[index + 1 :])


def _with_simpler_records(case: Case) -> Iterator[Case]:
    """Replace each record by a short text, or leave a key of it out."""
    simple = json.dumps(SIMPLEST)
    for index, line in enumerate(case.records):
        others = [simple, *(json.dumps(one, ensure_ascii=False) for one in _without_a_key(line))]
        for other in others:
            if len(other) < len(line):
                lines = (*case.records[:index], other, *case.records[index + 1 :])
                yield replace(case, records=lines)


def _without_a_key(line: str) -> Iterator[object]:
    record = json.loads(line)
    for key in record:
        if len(record) > 1:
            yield {name: value for name, value in record.items() if name != key}
    turns = record.get("messages")
    if isinstance(turns, list) and len(turns) > 2:
        yield {**record, "messages": turns[-2:]}
        yield {**record, "messages": turns[:2]}
