"""Write a report: ``report.json`` and ``report.html``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mcore_qwen3vl.converters.compare import Comparison
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.parity.compare import Report
from mcore_qwen3vl.report import plot
from mcore_qwen3vl.report.page import Page, page_of
from mcore_qwen3vl.trace.result import Trace

WORST_SHOWN = 30


def write_report(result: Page | Report | Comparison | Trace, folder: str | Path) -> Page:
    """Write ``report.json`` and ``report.html`` into `folder`, made if absent.

    The page needs no network and no other file; it stays below 1 MB whatever the size of the
    model, because it draws and lists only so many comparisons. The JSON has all of them.

    Args:
        result: of any ``verify`` command.
        folder: where to write.

    Returns:
        What was written, as a page.

    Raises:
        BadInput: `folder` cannot be written.
    """
    page = result if isinstance(result, Page) else page_of(result)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = json.dumps(page.to_dict(), indent=1, default=str)
        (folder / "report.json").write_text(data + "\n", encoding="utf-8")
        (folder / "report.html").write_text(html(page), encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"The report cannot be written to {folder}: {error.strerror}. Choose another --report."
        ) from None
    return page


def html(page: Page) -> str:
    """The page as HTML, everything inline."""
    environment = Environment(
        loader=PackageLoader("mcore_qwen3vl.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"number": _number, "allowance": _allowance}
    return environment.get_template("page.html.jinja").render(
        page=page,
        plots=plot.plots(page),
        worst=page.worst(WORST_SHOWN),
        contexts=any(line.context for line in page.lines),
        width=plot.WIDTH,
        height=plot.HEIGHT,
        left=plot.LEFT,
        top=plot.TOP,
        bottom=plot.BOTTOM,
    )


def _number(value: Any) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.1e}"


def _allowance(value: float | None) -> str:
    return "bitwise" if value == 0 else _number(value)
