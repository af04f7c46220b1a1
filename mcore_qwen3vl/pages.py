"""HTML pages from templates beside the code, all in the style of ``pages.css``."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def templates(package: str) -> Environment:
    """Return the environment of a package's ``*.jinja`` templates, which can include ``pages.css``.

    Values are escaped, and a missing value is an error.
    """
    return Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("mcore_qwen3vl", ".")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
