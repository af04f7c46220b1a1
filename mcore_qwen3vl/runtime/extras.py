"""Packages that only some commands need, and the extra of ``mcore-qwen3vl`` that brings each."""

from __future__ import annotations

from importlib.util import find_spec

from mcore_qwen3vl.errors import BadInput

_EXTRAS = {"matplotlib": "plots", "pyarrow": "data", "tensorboard": "logging"}


def require_extra(package: str, what: str) -> None:
    """Raise an error that names the extra to install, if a package is missing.

    Raises:
        BadInput: the package is not installed. The message begins with `what`, which needs it.
    """
    if find_spec(package) is None:
        raise BadInput(
            f"{what} needs the package {package}: pip install 'mcore-qwen3vl[{_EXTRAS[package]}]'."
        )
