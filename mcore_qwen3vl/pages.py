"""HTML pages from templates that lie beside the code."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def templates(package: str) -> Environment:
    """The ``*.jinja`` of a package; what they are given is escaped, and what they lack an error."""
    return Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
