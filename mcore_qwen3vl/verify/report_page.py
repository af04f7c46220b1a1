"""The files of a report: ``report.html`` for people, ``report.json`` and ``junit.xml`` for CI."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

from mcore_qwen3vl.console import visible
from mcore_qwen3vl.files import atomic_write, templates
from mcore_qwen3vl.verify.measurement import Finding
from mcore_qwen3vl.verify.report import Report, allowance, number

WORST_SHOWN = 30
NEAREST_SHOWN = 10
"""The comparisons nearest to their limits fill the list up to this many lines."""


def write_report(report: Report, folder: str | Path) -> None:
    """Write ``report.html``, ``report.json`` and ``junit.xml`` into `folder`, made if missing.

    The page needs no network and no other file. It stays below 1 MB whatever the size of the model,
    because it draws and lists a limited number of comparisons. The JSON has all of them; see
    :mod:`mcore_qwen3vl.verify.report` for its keys.

    Raises:
        BadInput: `folder` cannot be written.
    """
    folder = Path(folder)
    data = json.dumps(report.to_dict(), indent=1, default=str)
    files = {
        "report.json": f"{data}\n".encode(),
        "report.html": html(report).encode(errors="backslashreplace"),
        "junit.xml": junit(report),
    }
    for name, content in files.items():
        with atomic_write(folder / name, "Choose another --report.") as partial:
            folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)


def junit(report: Report) -> bytes:
    """Return the XML that CI systems show, with a test case for each part and context."""
    parts = report.parts()
    title = visible(report.title)  # XML cannot hold control characters
    suite = ElementTree.Element("testsuite", name=title, tests=str(len(parts)))
    suite.set("failures", str(sum(summary.failed > 0 for summary in parts.values())))
    for (context, part), summary in parts.items():
        name = visible(f"{part} ({context})" if context else part)
        case = ElementTree.SubElement(suite, "testcase", classname=title, name=name)
        if summary.failed:
            message = f"{summary.failed} of {summary.count} comparisons failed"
            worst = visible(str(summary.worst))
            ElementTree.SubElement(case, "failure", message=message).text = worst
    if not parts:
        ElementTree.SubElement(suite, "error", message=visible(report.verdict))
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)


def html(report: Report) -> str:
    """Return the report as HTML, with everything inline."""
    environment = templates("mcore_qwen3vl.verify")
    environment.filters |= {"number": number, "allowance": allowance}
    content = report.to_dict()
    failures = len(report.failures)
    listed = min(max(failures, NEAREST_SHOWN), WORST_SHOWN)
    return environment.get_template("page.html.jinja").render(
        report=report,
        environment=content["environment"],
        command=content["command"],
        plots=plots(report),
        worst=[finding for finding in report.worst() if finding.error or not finding.ok][:listed],
        failures=failures,
        contexts=any(finding.context for finding in report.findings),
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        top=TOP,
        bottom=BOTTOM,
    )


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
