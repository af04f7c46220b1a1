"""A report on the terminal: the verdict, a table by part, and the failures."""

from __future__ import annotations

import math
from textwrap import indent

from rich.console import Group
from rich.table import Table

from mcore_qwen3vl.console import plain, table
from mcore_qwen3vl.verify.report.measurement import Finding
from mcore_qwen3vl.verify.report.result import Report


def render(report: Report) -> Group:
    """Return the report in a form that rich prints."""
    verdict = "[bold green]equal[/]" if report.ok else "[bold red]different[/]"
    lines: list[str | Table] = [f"{verdict}: {plain(report.title)}. {plain(report.verdict)}"]
    for heading, text in report.notes.items():
        lines.append(f"[bold]{plain(heading)}[/]\n" + plain(indent(text, "  ")))
    if report.findings:
        lines.append(by_part(report))
    failures, shown = report.failures, report.failures_shown
    lines += [f"  {plain(str(finding))}" for finding in failures[:shown]]
    if len(failures) > shown:
        lines.append(f"  and {len(failures) - shown} more; --json lists them all")
    return Group(*lines)


def by_part(report: Report) -> Table:
    """Return a table with a line for each part and context, and the worst comparison of each."""
    title = ", ".join(f"{name} {value}" for name, value in report.environment.items())
    columns = ("in", "part", ">compared", ">failed", ">error", ">allowed", "worst", "")
    contexts = any(finding.context for finding in report.findings)
    shown = table(title, *columns[not contexts :])
    for summary in report.parts().values():
        worst = summary.worst
        cells = [
            plain(summary.context),
            plain(summary.part),
            f"{summary.count:,}",
            f"{summary.failed:,}",
            number(worst),
            allowance(worst),
            plain(worst.name) if worst.error or summary.failed else "",
            "[bold red]WRONG[/]" if summary.failed else "[green]ok[/]",
        ]
        shown.add_row(*cells[not contexts :])
    return shown


def number(finding: Finding) -> str:
    """Return the relative error as text; blank if there are no numbers."""
    if finding.flaw or not finding.measured.count:
        return ""
    if not math.isfinite(finding.error):
        return "not finite"
    return f"{finding.error:.1e}" if finding.error else "0"


def allowance(finding: Finding) -> str:
    """Return the tolerance as text; blank if there are no numbers."""
    if not finding.measured.count:
        return ""
    return f"{finding.tolerance:.1e}" if finding.tolerance else "bitwise"
