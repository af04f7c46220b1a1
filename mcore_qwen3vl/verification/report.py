"""The result of every ``verify`` command: on the terminal, as a page, for CI and as JSON.

The JSON of both ``--json`` and ``report.json`` has these keys::

    format       2, raised when a key changes its meaning
    title        what was compared with what
    ok           the verdict: something was compared and all of it holds
    verdict      the verdict in words
    notes        paragraphs by heading, such as where two models first differ
    parts        for each part and context: compared, failed, and the name of the worst
    findings     every comparison: Finding.to_dict
    environment  versions, and what else the numbers depend on, such as the layout
    command      the command line
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar
from xml.etree import ElementTree

from rich.console import Group
from rich.table import Table

from mcore_qwen3vl import __version__
from mcore_qwen3vl.certificate_file import FORMAT_OF_REPORT
from mcore_qwen3vl.console import command_line, plain, table, visible
from mcore_qwen3vl.errors import CheckFailed
from mcore_qwen3vl.files import atomic_write
from mcore_qwen3vl.html_pages import templates
from mcore_qwen3vl.machine import version_of
from mcore_qwen3vl.verification.measurement import Finding

WORST_SHOWN = 5


@dataclass(frozen=True)
class PartSummary:
    """The number of one part's comparisons, and the one to look at first."""

    part: str
    context: str
    count: int
    failed: int
    worst: Finding


@dataclass
class Report:
    """The result of a comparison.

    Attributes:
        environment: layout, dtype and whatever else the numbers depend on, besides versions.
        findings: one for each thing compared, in the order of the network.
    """

    title: str
    environment: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    failures_shown: ClassVar[int] = 20  # on a terminal

    @property
    def ok(self) -> bool:
        """Whether something was compared and all of it holds."""
        return bool(self.findings) and all(finding.ok for finding in self.findings)

    @property
    def equal(self) -> bool:
        """The same as `ok`: tensors and files bit for bit, computed values within tolerance."""
        return self.ok

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        count = len(self.findings)
        if not count:
            return "Nothing was compared."
        if self.ok:
            return f"All {count:,} comparisons hold."
        return f"{len(self.failures):,} of {count:,} comparisons failed."

    @property
    def notes(self) -> dict[str, str]:
        """Paragraphs by heading, for people."""
        return {}

    @property
    def failures(self) -> list[Finding]:
        """The findings that failed, the worst first."""
        return [finding for finding in self.worst() if not finding.ok]

    def worst(self) -> list[Finding]:
        """Return the findings: failures first, then those nearest to their tolerances."""
        return sorted(self.findings, key=lambda finding: finding.badness, reverse=True)

    def parts(self) -> dict[tuple[str, str], PartSummary]:
        """Return summaries by context and part, in the order in which they first appear."""
        members: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            members.setdefault((finding.context, finding.part), []).append(finding)
        return {
            (context, part): PartSummary(
                part,
                context,
                len(findings),
                sum(not finding.ok for finding in findings),
                max(findings, key=lambda finding: finding.badness),
            )
            for (context, part), findings in members.items()
        }

    def require(self) -> None:
        """Raise an error unless something was compared and all of it holds.

        Raises:
            CheckFailed: it does not hold; the message names the worst findings.
        """
        if self.ok:
            return
        failures = self.failures
        lines = [f"{self.title}: {self.verdict}", *map(str, failures[:WORST_SHOWN])]
        if len(failures) > WORST_SHOWN:
            lines.append(f"and {len(failures) - WORST_SHOWN} more")
        raise CheckFailed("\n  ".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, as described at the top of this module."""
        return {
            "format": FORMAT_OF_REPORT,
            "title": self.title,
            "ok": self.ok,
            "verdict": self.verdict,
            "notes": self.notes,
            "parts": [
                {"part": part, "context": context, "compared": summary.count,
                 "failed": summary.failed, "worst": summary.worst.name}
                for (context, part), summary in self.parts().items()
            ],
            "findings": [finding.to_dict() for finding in self.findings],
            "environment": {**environment(), **self.environment},
            "command": command_line(),
        }  # fmt: skip


PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine")


def environment() -> dict[str, str]:
    """Return the versions of the packages that compute, and the machine."""
    versions = {"mcore-qwen3vl": __version__}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version_of(package)
    versions["python"] = platform.python_version()
    versions["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    return versions


def render(report: Report) -> Group:
    """Return the report in a form that rich prints."""
    verdict = "[bold green]equal[/]" if report.ok else "[bold red]different[/]"
    lines: list[str | Table] = [f"{verdict}: {plain(report.title)}. {plain(report.verdict)}"]
    for heading, text in report.notes.items():
        lines.append(f"[bold]{plain(heading)}[/]\n" + plain(indent(text, "  "), lines=True))
    if report.findings:
        lines.append(parts_table(report))
    failures, shown = report.failures, report.failures_shown
    lines += [f"  {plain(str(finding))}" for finding in failures[:shown]]
    if len(failures) > shown:
        lines.append(f"  and {len(failures) - shown} more; --json lists them all")
    return Group(*lines)


def parts_table(report: Report) -> Table:
    """Return a table with a line for each part and context, and the worst comparison of each."""
    title = ", ".join(f"{name} {value}" for name, value in report.environment.items())
    columns = ("in", "part", ">compared", ">failed", ">error", ">allowed", "worst", "")
    contexts = any(finding.context for finding in report.findings)
    shown = table(title, *columns[not contexts :])  # without contexts, there is no first column
    for summary in report.parts().values():
        worst = summary.worst
        cells = [
            plain(summary.context),
            plain(summary.part),
            f"{summary.count:,}",
            f"{summary.failed:,}",
            error_text(worst),
            tolerance_text(worst),
            plain(worst.name) if worst.relative_error or summary.failed else "",
            "[bold red]WRONG[/]" if summary.failed else "[green]ok[/]",
        ]
        shown.add_row(*cells[not contexts :])
    return shown


def error_text(finding: Finding) -> str:
    """Return the relative error as text; blank if there are no numbers."""
    if finding.flaw or not finding.measured.count:
        return ""
    if not math.isfinite(finding.relative_error):
        return "not finite"
    return f"{finding.relative_error:.1e}" if finding.relative_error else "0"


def tolerance_text(finding: Finding) -> str:
    """Return the tolerance as text; blank if there are no numbers."""
    if not finding.measured.count:
        return ""
    return f"{finding.tolerance:.1e}" if finding.tolerance else "bitwise"


LISTED = 30
NEAREST_LISTED = 10
"""The comparisons nearest to their limits fill the page's list up to this many lines."""


def write_report(
    report: Report, folder: str | Path, content: Mapping[str, Any] | None = None
) -> None:
    """Write ``report.html``, ``report.json`` and ``junit.xml`` into `folder`, made if missing.

    The page needs no network and no other file. It lists the worst comparisons; the JSON has all of
    them, see the top of this module for its keys.

    Args:
        content: of ``report.json``; default: the report's own.

    Raises:
        BadInput: `folder` cannot be written.
    """
    folder = Path(folder)
    data = json.dumps(content or report.to_dict(), indent=1, default=str)
    files = {
        "report.json": f"{data}\n".encode(),
        "report.html": html(report).encode(errors="backslashreplace"),
        "junit.xml": junit(report),
    }
    for name, text in files.items():
        with atomic_write(folder / name, "Choose another --report.") as partial:
            folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(text)


_NOT_OF_XML = re.compile("[\ud800-\udfff\ufffe\uffff]")


def _xml_text(text: str) -> str:
    """Return `text` with what XML cannot hold spelled out: control characters and no characters."""
    return _NOT_OF_XML.sub(lambda none: ascii(none[0])[1:-1], visible(text))


def junit(report: Report) -> bytes:
    """Return the XML that CI systems show, with a test case for each part and context."""
    parts = report.parts()
    title = _xml_text(report.title)
    suite = ElementTree.Element("testsuite", name=title, tests=str(len(parts)))
    suite.set("failures", str(sum(summary.failed > 0 for summary in parts.values())))
    for (context, part), summary in parts.items():
        name = _xml_text(f"{part} ({context})" if context else part)
        case = ElementTree.SubElement(suite, "testcase", classname=title, name=name)
        if summary.failed:
            message = f"{summary.failed} of {summary.count} comparisons failed"
            worst = _xml_text(str(summary.worst))
            ElementTree.SubElement(case, "failure", message=message).text = worst
    if not parts:
        ElementTree.SubElement(suite, "error", message=_xml_text(report.verdict))
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)


def html(report: Report) -> str:
    """Return the report as HTML, with everything inline."""
    environment = templates("mcore_qwen3vl.verification")
    environment.filters |= {"error_text": error_text, "tolerance_text": tolerance_text}
    content = report.to_dict()
    failures = len(report.failures)
    listed = min(max(failures, NEAREST_LISTED), LISTED)
    worst = [finding for finding in report.worst() if finding.relative_error or not finding.ok]
    return environment.get_template("page.html.jinja").render(
        report=report,
        environment=content["environment"],
        command=content["command"],
        worst=worst[:listed],
        failures=failures,
        contexts=any(finding.context for finding in report.findings),
    )
