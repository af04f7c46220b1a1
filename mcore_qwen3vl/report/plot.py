"""The error along the network, as the geometry of an SVG drawing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

from mcore_qwen3vl.report.page import Line, Page

WIDTH, HEIGHT = 1040, 260
LEFT, TOP, BOTTOM = 58, 14, 34
POINTS = 600
"""Comparisons drawn in one plot; of more, neighbours share a point, the worst of them."""
PLOTS = 4
FEWEST = 4
"""A part with fewer comparisons is not plotted."""
FLOOR = 1e-9
CEILING = 1e3


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    limit: float
    line: Line


@dataclass(frozen=True)
class Band:
    """A region of the network on the x axis."""

    x: float
    width: float
    label: str
    shaded: bool


@dataclass(frozen=True)
class Plot:
    """One part's errors; y is logarithmic."""

    title: str
    points: list[Point]
    bands: list[Band]
    decades: list[tuple[float, str]]  # y and label of the grid lines

    @property
    def limits(self) -> str:
        """The tolerance as an SVG polyline."""
        return " ".join(f"{p.x:.1f},{p.limit:.1f}" for p in self.points)

    @property
    def errors(self) -> str:
        return " ".join(f"{p.x:.1f},{p.y:.1f}" for p in self.points)


def plots(page: Page) -> list[Plot]:
    """A plot for each part with numbers enough, in the order of the page."""
    made = []
    for summary in page.parts():
        lines = [
            line
            for line in page.lines
            if (line.part, line.context) == (summary.part, summary.context)
            and line.error is not None
            and line.tolerance
        ]
        if len(lines) >= FEWEST and any(line.error for line in lines):
            context = f" ({summary.context})" if summary.context else ""
            made.append(_plot(summary.part + context, _thinned(lines)))
    return made[:PLOTS]


def _thinned(lines: list[Line]) -> list[Line]:
    size = -(-len(lines) // POINTS)
    chunks = (lines[i : i + size] for i in range(0, len(lines), size))
    return [max(chunk, key=lambda line: line.badness) for chunk in chunks]


def _plot(title: str, lines: list[Line]) -> Plot:
    values = [_clamped(v) for line in lines for v in (line.error, line.tolerance) if v]
    low = math.floor(math.log10(min(values)))
    high = max(math.ceil(math.log10(max(values))), low + 2)
    step = (WIDTH - LEFT) / len(lines)

    def y(value: float | None) -> float:
        share = (math.log10(_clamped(value or FLOOR)) - low) / (high - low)
        return HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - BOTTOM - TOP)

    points = [
        Point(LEFT + (i + 0.5) * step, y(line.error), y(line.tolerance), line)
        for i, line in enumerate(lines)
    ]
    every = max((high - low) // 6, 1)
    decades = [(y(10.0**e), f"1e{e}") for e in range(low, high + 1, every)]
    return Plot(title, points, _bands(lines, step), decades)


def _bands(lines: list[Line], step: float) -> list[Band]:
    bands: list[Band] = []
    at = 0
    for region, members in groupby(lines, key=lambda line: line.region):
        count = len(list(members))
        width = count * step
        shown = region if width > 6.2 * len(region) else ""
        bands.append(Band(LEFT + at * step, width, shown, len(bands) % 2 == 1))
        at += count
    return bands


def _clamped(value: float) -> float:
    return min(max(value, FLOOR), CEILING)
