"""A trace on the terminal."""

from __future__ import annotations

from mcore_qwen3vl import console
from mcore_qwen3vl.parity.report import worst_of_each_part
from mcore_qwen3vl.trace.result import ACTIVATIONS, Trace

AROUND = 3
"""Places shown before and after the first that is out of bounds."""


def show_trace(trace: Trace) -> None:
    """Each part's worst comparison, and what happens around the first place out of bounds."""
    mark = "[bold green]equal[/]" if trace.ok else "[bold red]different[/]"
    console.output.print(f"{mark}: {console.plain(trace.verdict)}")
    if trace.cause is not None:
        console.output.print(f"evidence: {console.plain(trace.cause.evidence)}")
    console.output.print(worst_of_each_part(trace.report))
    if trace.first is not None and trace.first.part == ACTIVATIONS:
        _show_surroundings(trace)


def _show_surroundings(trace: Trace) -> None:
    path = [f for f in trace.report.findings if f.part == ACTIVATIONS]
    at = path.index(trace.first) if trace.first in path else 0
    lines = console.table("along the data path", "place", ">error", ">allowed", "")
    for finding in path[max(at - AROUND, 0) : at + AROUND + 1]:
        verdict = "[green]ok[/]" if finding.ok else "[red]out of bounds[/]"
        arrow = "  <- first" if finding is trace.first else ""
        lines.add_row(
            console.plain(finding.name),
            f"{finding.error:.1e}",
            f"{finding.tolerance:.1e}",
            verdict + arrow,
        )
    console.output.print(lines)
