"""A rehearsal as one HTML page with memory over time; it needs no network and no other file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.pages import templates
from mcore_qwen3vl.rehearsal.outcome import Rehearsal, RoleOutcome

WIDTH, HEIGHT = 1040, 280
LEFT, TOP, BOTTOM = 52, 12, 26
SERIES = 9
"""Holders with a colour of their own; the smaller ones are drawn together."""
COLOURS = (
    *("#3b6fd4", "#c4320a", "#12805c", "#b54fb0", "#c08a00", "#1796a8", "#7a5af8", "#8a6d3b"),
    *("#5c8a2f", "#98a2b3"),
)


@dataclass(frozen=True)
class Area:
    """One holder's share of the plot."""

    name: str
    colour: str
    points: str
    """An SVG polygon."""


@dataclass(frozen=True)
class Plot:
    """Memory of one role over its allocations, stacked by holder."""

    areas: list[Area]
    limit: float | None
    """y of what the device has for tensors, if it is in the picture."""
    ticks: list[tuple[float, str]]
    marks: list[tuple[float, str]]
    """x and name of the stages."""


def write_page(found: Rehearsal, file: Path) -> None:
    """Write the page.

    Raises:
        BadInput: `file` cannot be written.
    """
    environment = templates("mcore_qwen3vl.rehearsal.report")
    environment.filters["gb"] = lambda size: f"{size / 1e9:.2f}"
    page = environment.get_template("page.html.jinja").render(
        found=found,
        plots=[plot(outcome) for outcome in found.outcomes],
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        top=TOP,
        bottom=BOTTOM,
    )
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"The report cannot be written to {file}: {error.strerror}. Choose another --report."
        ) from None


def plot(outcome: RoleOutcome) -> Plot:
    """Stacked areas, the largest holder at the bottom; x is the order of allocations."""
    moments: list[dict[str, Any]] = outcome.found["over time"]
    largest: dict[str, int] = {}
    for moment in moments:
        for name, size in moment["sizes"].items():
            largest[name] = max(largest.get(name, 0), size)
    names = sorted(largest, key=lambda name: -largest[name])
    own, rest = names[:SERIES], names[SERIES:]
    top = max([m["allocated"] for m in moments] + [1]) * 1.05
    step = (WIDTH - LEFT) / max(len(moments) - 1, 1)

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - size / top * (HEIGHT - BOTTOM - TOP)

    areas, below = [], [0.0] * len(moments)
    for name, colour in zip([*own, "smaller ones"] if rest else own, COLOURS, strict=False):
        members = rest if name == "smaller ones" else [name]
        above = [
            b + sum(m["sizes"].get(member, 0) for member in members)
            for b, m in zip(below, moments, strict=True)
        ]
        edge = [(LEFT + i * step, y(size)) for i, size in enumerate(above)]
        edge += [(LEFT + i * step, y(size)) for i, size in reversed(list(enumerate(below)))]
        areas.append(Area(name, colour, " ".join(f"{x:.0f},{h:.1f}" for x, h in edge)))
        below = above
    limit = y(outcome.usable) if outcome.usable <= top else None
    return Plot(areas, limit, _ticks(top, y), _marks(outcome, moments, step))


def _ticks(top: float, y: Any) -> list[tuple[float, str]]:
    steps = (s * 10**e for e in range(6, 13) for s in (1, 2, 5))
    every = next(s for s in steps if top / s <= 6)
    return [(y(n * every), f"{n * every / 1e9:g} GB") for n in range(int(top / every) + 1)]


def _marks(
    outcome: RoleOutcome, moments: list[dict[str, Any]], step: float
) -> list[tuple[float, str]]:
    """Where each stage begins, by the host's time."""
    marks, ended = [], 0.0
    for stage in outcome.report.stages[:-1]:
        start = next((i for i, m in enumerate(moments) if m["seconds"] >= ended), 0)
        marks.append((LEFT + start * step, stage.name))
        ended += stage.seconds
    return marks
