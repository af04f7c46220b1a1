"""The files of a report: ``report.html`` for people, ``report.json`` and ``junit.xml`` for CI."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from mcore_qwen3vl.console import visible
from mcore_qwen3vl.files import atomic_write, templates
from mcore_qwen3vl.verify.report import Report, allowance, number

WORST_SHOWN = 30
NEAREST_SHOWN = 10
"""The comparisons nearest to their limits fill the list up to this many lines."""


def write_report(report: Report, folder: str | Path) -> None:
    """Write ``report.html``, ``report.json`` and ``junit.xml`` into `folder`, made if missing.

    The page needs no network and no other file. It lists the worst comparisons; the JSON has all of
    them, see :mod:`mcore_qwen3vl.verify.report` for its keys.

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
        worst=[finding for finding in report.worst() if finding.error or not finding.ok][:listed],
        failures=failures,
        contexts=any(finding.context for finding in report.findings),
    )
