"""Show a report: a table for people, the worst finding of each part first."""

from __future__ import annotations

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from mcore_qwen3vl.console import table
from mcore_qwen3vl.parity.compare import WORST_SHOWN, Report


def render(report: Report) -> Group:
    """Something that rich prints: verdict, worst error of each part, and what failed."""
    verdict = "[bold green]equal[/]" if report.ok else "[bold red]different[/]"
    compared = f"{len(report.findings)} comparisons" if report.findings else "nothing was compared"
    lines: list[str | Table] = [
        f"{verdict}: {escape(report.title)} ({compared})",
        worst_of_each_part(report),
    ]
    failures = report.failures
    lines += [f"  {escape(str(finding))}" for finding in failures[:WORST_SHOWN]]
    if len(failures) > WORST_SHOWN:
        lines.append(f"  and {len(failures) - WORST_SHOWN} more")
    return Group(*lines)


def worst_of_each_part(report: Report) -> Table:
    """A table with one line for each batch and part."""
    title = ", ".join(f"{name} {value}" for name, value in report.environment.items())
    shown = table(title, "batch", "part", ">worst error", ">tolerance", "where", "")
    for (context, part), finding in report.worst().items():
        shown.add_row(
            escape(context),
            part,
            f"{finding.error:.1e}",
            f"{finding.tolerance:.1e}",
            escape(finding.name),
            "[green]ok[/]" if finding.ok else "[bold red]WRONG[/]",
        )
    return shown
