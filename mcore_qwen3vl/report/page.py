"""What a report shows, whichever ``verify`` command made it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from mcore_qwen3vl.converters.compare import Comparison
from mcore_qwen3vl.parity.compare import Finding, Report
from mcore_qwen3vl.report.environment import command_line, environment
from mcore_qwen3vl.trace.result import Trace

EPSILON = 2.0**-23


@dataclass(frozen=True)
class Line:
    """One comparison.

    Attributes:
        part: what kind of thing was compared.
        name: which one.
        ok: it holds.
        error: largest error relative to the largest expected magnitude; None where there is no
            number, as for a file.
        tolerance: what `error` may be; 0 is bitwise.
        detail: what else there is to say.
        context: where it was found, for example the batch.
    """

    part: str
    name: str
    ok: bool
    error: float | None = None
    tolerance: float | None = None
    detail: str = ""
    context: str = ""

    @property
    def badness(self) -> tuple[bool, float]:
        """Failures first, then by error over tolerance, or over float32's where it is bitwise."""
        return not self.ok, (self.error or 0.0) / (self.tolerance or EPSILON)

    @property
    def region(self) -> str:
        """The piece of the network that the name belongs to."""
        layer = re.search(r"language_model\.layers\.(\d+)", self.name)
        if layer:
            return f"layer {layer[1]}"
        block = re.search(r"visual\.blocks\.(\d+)", self.name)
        return f"block {block[1]}" if block else "vision" if "visual" in self.name else "ends"


@dataclass(frozen=True)
class Summary:
    """All comparisons of one part."""

    part: str
    context: str
    count: int
    failed: int
    worst: Line


@dataclass
class Page:
    """A report.

    Attributes:
        title: what was compared with what.
        ok: the verdict.
        verdict: the verdict in words.
        lines: every comparison, in the order of the network.
        notes: paragraphs with a heading, such as the cause of a difference.
        environment: what the numbers depend on.
        command: the exact command.
    """

    title: str
    ok: bool
    verdict: str
    lines: list[Line]
    notes: dict[str, str] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=environment)
    command: str = field(default_factory=command_line)

    @property
    def failures(self) -> int:
        return sum(not line.ok for line in self.lines)

    def parts(self) -> list[Summary]:
        """By part and context, in the order in which they first appear."""
        order = {key: i for i, key in enumerate(dict.fromkeys(map(_part_of, self.lines)))}
        ordered = sorted(self.lines, key=lambda line: order[_part_of(line)])
        summaries = []
        for (part, context), lines in groupby(ordered, key=_part_of):
            members = list(lines)
            failed = sum(not line.ok for line in members)
            worst = max(members, key=lambda line: line.badness)
            summaries.append(Summary(part, context, len(members), failed, worst))
        return summaries

    def worst(self, count: int) -> list[Line]:
        """The worst comparisons: failures, then the nearest to their tolerance."""
        return sorted(self.lines, key=lambda line: line.badness, reverse=True)[:count]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, infinities as text."""
        made = asdict(self)
        for line in made["lines"]:
            if line["error"] is not None and not math.isfinite(line["error"]):
                line["error"] = str(line["error"])
        return {"format": 1, **made}


def page_of(result: Report | Comparison | Trace) -> Page:
    """The page of any ``verify`` command's result."""
    if isinstance(result, Trace):
        return _of_trace(result)
    return _of_report(result) if isinstance(result, Report) else _of_comparison(result)


def _of_report(report: Report) -> Page:
    failed = len(report.failures)
    count = len(report.findings)
    verdict = (
        f"All {count} comparisons hold."
        if report.ok
        else f"{failed} of {count} comparisons failed."
        if count
        else "Nothing was compared."
    )
    facts = {**environment(), **report.environment}
    return Page(report.title, report.ok, verdict, _lines(report.findings), {}, facts)


def _of_trace(trace: Trace) -> Page:
    page = _of_report(trace.report)
    page.verdict = trace.verdict
    if trace.first is not None:
        page.notes["Where"] = (
            f"{trace.first.name}, {trace.first.part}: relative error {trace.first.error:.2e}, "
            f"where rounding allows {trace.first.tolerance:.1e}. Everything before it on the data "
            "path agrees."
        )
    if trace.cause is not None:
        page.notes[f"Cause: {trace.cause.kind}"] = trace.cause.explanation
        sure = "Evidence" if trace.cause.confirmed else "Evidence, not conclusive"
        page.notes[sure] = trace.cause.evidence
    return page


def _of_comparison(comparison: Comparison) -> Page:
    tensors = [
        Line("tensors", f.name, f.ok, 0.0 if f.ok else None, 0.0, "" if f.ok else _status(f))
        for f in comparison.tensors
    ]
    files = [
        Line("files", name, status == "equal", detail="" if status == "equal" else status)
        for name, status in comparison.files.items()
    ]
    problems = len(comparison.problems)
    verdict = (
        f"All {len(tensors)} tensors and {len(files)} other files are equal, bit for bit."
        if comparison.ok
        else f"{problems} of {len(tensors) + len(files)} tensors and files differ."
    )
    return Page(f"{comparison.a} and {comparison.b}", comparison.ok, verdict, [*tensors, *files])


def _status(finding: Any) -> str:
    return f"{finding.status} {finding.detail}".strip()


def _lines(findings: Iterable[Finding]) -> list[Line]:
    return [
        Line(
            f.part,
            f.name,
            f.ok,
            f.error,
            f.tolerance,
            "" if f.complete else f"{f.measured.count} of {f.expected_count} values were compared",
            f.context,
        )
        for f in findings
    ]


def _part_of(line: Line) -> tuple[str, str]:
    return line.part, line.context
