"""The error along the network, as the geometry of an SVG drawing."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import groupby

from mcore_qwen3vl.verify.report.measurement import Finding
from mcore_qwen3vl.verify.report.result import Report

WIDTH, HEIGHT = 1040, 260
LEFT, TOP, BOTTOM = 58, 14, 34
POINTS = 600
"""The most points in one plot; with more comparisons, neighbours share the point of the worst."""
PLOTS = 4
FEWEST = 4
"""Comparisons below which a part is not plotted."""
FLOOR = 1e-9
CEILING = 1e3


@dataclass(frozen=True)
class PlotPoint:
    x: float
    y: float
    limit: float | None  # None: bitwise, which has no place on a logarithmic axis
    finding: Finding


@dataclass(frozen=True)
class Band:
    """A region of the network on the x axis."""

    x: float
    width: float
    label: str
    shaded: bool


@dataclass(frozen=True)
class Plot:
    """One part's relative errors; y is logarithmic."""

    title: str
    points: list[PlotPoint]
    bands: list[Band]
    decades: list[tuple[float, str]]  # y and label of the grid lines

    @property
    def limits(self) -> str:
        """The tolerance as an SVG polyline."""
        return " ".join(f"{p.x:.1f},{p.limit:.1f}" for p in self.points if p.limit is not None)

    @property
    def errors(self) -> str:
        return " ".join(f"{p.x:.1f},{p.y:.1f}" for p in self.points)


def plots(report: Report) -> list[Plot]:
    """Return a plot for each part with enough numbers, in the order of the report."""
    made = []
    for context, part in report.parts():
        found = [
            finding
            for finding in report.findings
            if (finding.context, finding.part) == (context, part) and finding.measured.count
        ]
        if len(found) >= FEWEST and any(finding.error for finding in found):
            made.append(_plot(f"{part} ({context})" if context else part, _thinned(found)))
    return made[:PLOTS]


def region(name: str) -> str:
    """Return the region of the network that a tensor or module belongs to."""
    layer = re.search(r"language_model\.layers\.(\d+)", name)
    if layer:
        return f"layer {layer[1]}"
    block = re.search(r"visual\.blocks\.(\d+)", name)
    return f"block {block[1]}" if block else "vision" if "visual" in name else "ends"


def _thinned(found: list[Finding]) -> list[Finding]:
    size = -(-len(found) // POINTS)
    chunks = (found[i : i + size] for i in range(0, len(found), size))
    return [max(chunk, key=lambda finding: finding.badness) for chunk in chunks]


def _plot(title: str, found: list[Finding]) -> Plot:
    values = [_clamped(v) for f in found for v in (f.error, f.tolerance) if v]
    low = math.floor(math.log10(min(values)))
    high = max(math.ceil(math.log10(max(values))), low + 2)
    zeros = any(not f.error for f in found)
    low -= 2 * zeros  # room for zeros below the smallest error
    step = (WIDTH - LEFT) / len(found)

    def y(value: float) -> float:
        share = (math.log10(_clamped(value)) - low) / (high - low)
        return HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - BOTTOM - TOP)

    points = [
        PlotPoint(LEFT + (i + 0.5) * step, y(f.error), y(f.tolerance) if f.tolerance else None, f)
        for i, f in enumerate(found)
    ]
    every = max((high - low) // 6, 1)
    decades = [(y(10.0**e), f"1e{e}") for e in range(low + 2 * zeros, high + 1, every)]
    decades += [(y(FLOOR), "0")] * zeros
    return Plot(title, points, _bands(found, step), decades)


def _bands(found: list[Finding], step: float) -> list[Band]:
    bands: list[Band] = []
    at = 0
    for name, members in groupby(found, key=lambda finding: region(finding.name)):
        count = len(list(members))
        width = count * step
        shown = name if width > 6.2 * len(name) else ""
        bands.append(Band(LEFT + at * step, width, shown, len(bands) % 2 == 1))
        at += count
    return bands


def _clamped(value: float) -> float:
    return min(max(value, FLOOR), CEILING)
