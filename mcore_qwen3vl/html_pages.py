"""Templates of HTML pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


def templates(package: str) -> Environment:
    """Return a package's ``*.jinja`` templates of HTML pages, which can include ``pages.css``.

    Values are escaped, and a missing value is an error.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), PackageLoader("mcore_qwen3vl", ".")]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
