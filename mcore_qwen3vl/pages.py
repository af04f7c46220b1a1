"""HTML pages from templates that lie beside the code, in one style: ``pages.css``."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def templates(package: str) -> Environment:
    """The ``*.jinja`` of a package, which include ``pages.css``.

    Values are escaped, and a value that is missing is an error.
    """
    return Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("mcore_qwen3vl", ".")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
