"""A rehearsal as one HTML page with memory over time, which needs no network or other file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from mcore_qwen3vl import console
from mcore_qwen3vl.files import atomic_write, templates
from mcore_qwen3vl.rehearsal.outcome import Rehearsal, RoleOutcome
from mcore_qwen3vl.runtime.gpus import GIB

WIDTH, HEIGHT = 1040, 280
LEFT, TOP, BOTTOM = 52, 22, 28
LINE = 15
"""Pixels from one line of labels to the next."""
LETTER = 6.5
"""Approximate width of a letter of a label, in pixels."""
FAR = 10
"""The GPU's memory is in the picture if it is less than this many times the peak."""
SERIES = 9
"""Number of holders with a colour of their own; the smaller ones are drawn together."""
COLOURS = (
    *("#3b6fd4", "#c4320a", "#12805c", "#b54fb0", "#c08a00", "#1796a8", "#7a5af8", "#8a6d3b"),
    *("#5c8a2f", "#98a2b3"),
)


class Area(NamedTuple):
    """One holder's share of the plot, an SVG polygon."""

    name: str
    colour: str
    points: str


class Mark(NamedTuple):
    """The beginning of an interval; `y` is the line of its label."""

    x: float
    y: float
    name: str


class Plot(NamedTuple):
    """Memory of one role over its allocations, stacked by holder."""

    areas: list[Area]
    limit: float | None  # y of the memory usable for tensors; None: far above the picture
    ticks: list[tuple[float, str]]
    marks: list[Mark]
    floor: float  # y of zero memory
    height: float


def write_page(rehearsal: Rehearsal, file: Path) -> None:
    """Write the page.

    Raises:
        BadInput: `file` cannot be written.
    """
    environment = templates("mcore_qwen3vl.rehearsal")
    environment.filters["gb"] = lambda size: f"{size / 1e9:.2f}"
    page = environment.get_template("page.html.jinja").render(
        rehearsal=rehearsal,
        command=console.command_line(),
        gib=GIB,
        plots=[plot(outcome) for outcome in rehearsal.outcomes],
        width=WIDTH,
        left=LEFT,
        top=TOP,
    )
    with atomic_write(file, "Choose another --report.") as partial:
        partial.write_text(page, "utf-8", "backslashreplace")


def plot(outcome: RoleOutcome) -> Plot:
    """Return stacked areas, the largest holder at the bottom; x is the order of allocations."""
    moments: list[dict[str, Any]] = outcome.measured["over time"]
    maxima: dict[str, int] = {}
    for moment in moments:
        for name, size in moment["sizes"].items():
            maxima[name] = max(maxima.get(name, 0), size)
    names = sorted(maxima, key=lambda name: -maxima[name])
    largest, rest = names[:SERIES], names[SERIES:]
    peak = max([m["allocated"] for m in moments] + [1])
    in_sight = outcome.usable < FAR * peak
    top = (max(peak, outcome.usable) if in_sight else peak) * 1.05
    step = (WIDTH - LEFT) / max(len(moments) - 1, 1)

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - size / top * (HEIGHT - BOTTOM - TOP)

    areas, below = [], [0.0] * len(moments)
    for name, colour in zip([*largest, "smaller ones"] if rest else largest, COLOURS, strict=False):
        members = rest if name == "smaller ones" else [name]
        above = [
            b + sum(m["sizes"].get(member, 0) for member in members)
            for b, m in zip(below, moments, strict=True)
        ]
        edge = [(LEFT + i * step, y(size)) for i, size in enumerate(above)]
        edge += [(LEFT + i * step, y(size)) for i, size in reversed(list(enumerate(below)))]
        areas.append(Area(name, colour, " ".join(f"{x:.0f},{h:.1f}" for x, h in edge)))
        below = above
    limit = y(outcome.usable) if in_sight else None
    marks = _marks(outcome, moments, step)
    height = max([HEIGHT, *(mark.y + 6 for mark in marks)])
    return Plot(areas, limit, _ticks(top, y), marks, y(0), height)


def _ticks(top: float, y: Any) -> list[tuple[float, str]]:
    steps = (s * 10**e for e in range(6, 13) for s in (1, 2, 5))
    every = next(s for s in steps if top / s <= 6)
    return [(y(n * every), f"{n * every / 1e9:g} GB") for n in range(int(top / every) + 1)]


def _marks(outcome: RoleOutcome, moments: list[dict[str, Any]], step: float) -> list[Mark]:
    """Return where each interval begins; labels that would overlap get other lines."""
    marks: list[Mark] = []
    ends: list[float] = []  # x at which the last label of each line ends
    ended = 0.0
    for interval in outcome.report.intervals[:-1]:
        start = next((i for i, m in enumerate(moments) if m["seconds"] >= ended), 0)
        x = LEFT + start * step
        line = next((i for i, end in enumerate(ends) if end < x), len(ends))
        ends[line : line + 1] = [x + LETTER * (len(interval.name) + 2)]
        marks.append(Mark(x, HEIGHT - BOTTOM + LINE * (line + 1), interval.name))
        ended += interval.seconds
    return marks
