"""What this process runs on: its cores, versions of the main dependencies, optional packages."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mcore_qwen3vl import console
from mcore_qwen3vl.errors import BadInput

PACKAGES = ("torch", "transformers", "megatron-core", "megatron-energon", "peft")

EXTRAS = {"matplotlib": "plots", "pyarrow": "data", "tensorboard": "logging"}
"""Packages that only some commands need, each with its extra of ``mcore-qwen3vl``."""


def usable_cores() -> int:
    """Return how many cores this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS, where no process is bound to cores


def warn_of_versions() -> None:
    """Print a warning for each version that :func:`versions_outside` reports, on standard error."""
    for sentence in versions_outside():
        console.messages.print(f"[yellow]warning:[/] {console.plain(sentence)}", soft_wrap=True)


def versions_outside() -> Iterator[str]:
    """Yield one sentence for each version that ``pyproject.toml`` does not allow."""
    try:
        ours = metadata("mcore-qwen3vl")
    except PackageNotFoundError:  # a checkout that is not installed
        return
    python = SpecifierSet(ours["Requires-Python"])
    if not python.contains(platform.python_version(), prereleases=True):
        yield _version_sentence("Python", platform.python_version(), python)
    for requirement in map(Requirement, ours.get_all("Requires-Dist") or ()):
        if requirement.name not in PACKAGES:
            continue
        try:
            installed = version_of(requirement.name)
        except PackageNotFoundError:  # some commands work without it
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield _version_sentence(requirement.name, installed, requirement.specifier)


def version_of(package: str) -> str:
    """Return the version of the package that an import finds, or raise PackageNotFoundError.

    For megatron-core the import may find a checkout of Megatron-LM. The checkout stands before the
    installed package on PYTHONPATH and has no metadata.
    """
    # The spec of megatron.core itself would import megatron.
    parent = find_spec("megatron") if package == "megatron-core" else None
    folders = (parent and parent.submodule_search_locations) or ()
    files = (Path(folder) / "core" / "package_info.py" for folder in folders)
    file = next((file for file in files if file.exists()), None)
    if file is None:
        return version(package)
    text = file.read_text(encoding="utf-8")
    parts = re.findall(r"^(?:MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)", text, re.MULTILINE)
    return ".".join(parts[:3]) + parts[3]  # the pre-release, such as rc0, follows without a dot


def _version_sentence(name: str, installed: str, allowed: SpecifierSet) -> str:
    return (
        f"{name} {installed} is installed, and this package is tested with {name} {allowed}: what "
        "follows may fail or be wrong. Install one of those."
    )


def require_extra(package: str, what: str) -> None:
    """Raise an error that names the extra to install, if a package is missing.

    Raises:
        BadInput: the package is not installed. The message begins with `what`, which needs it.
    """
    if find_spec(package) is None:
        raise BadInput(
            f"{what} needs the package {package}: pip install 'mcore-qwen3vl[{EXTRAS[package]}]'."
        )
