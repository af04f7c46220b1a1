"""A stand-in for Transformer Engine's compiled extension, where only its Python is installed.

It has the names in Transformer Engine's source: enumerations with their members, and functions that
refuse to be called until :mod:`tests.model.te.device` gives them a reference.

Pytest loads it as a plugin (``-p tests.model.te.extension``), before anything imports megatron,
which imports Transformer Engine.
"""

from __future__ import annotations

import enum
import os
import re
import sys
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAME = "transformer_engine_torch"
MIRRORED = ("DType", "NVTE_Fused_Attn_Backend")
"""Enumerations whose members Transformer Engine repeats in Python and compares at import."""


def install() -> None:
    """Make ``transformer_engine.pytorch`` importable; megatron must not have been imported yet.

    Does nothing where the real extension is installed, or Transformer Engine is not.
    """
    package = _package()
    if package is None or _compiled(package):
        return
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # otherwise it looks for libraries
    sys.modules[NAME] = _stand_in(package / "pytorch")
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None


def _package() -> Path | None:
    spec = find_spec("transformer_engine")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _compiled(package: Path) -> bool:
    """Return whether the real extension is installed, from its wheel or built from source."""
    places = (package.parent, package, package / "wheel_lib")
    return any(file.suffix == ".so" for place in places for file in place.glob(f"{NAME}*"))


def _stand_in(package: Path) -> types.ModuleType:
    sources = "\n".join(path.read_text() for path in package.rglob("*.py"))
    module = types.ModuleType(NAME)
    for name in sorted(_names(sources)):
        value = _enumeration(name, sources) if name[0].isupper() else _refusing(name)
        setattr(module, name, value)
    return module


def _names(sources: str) -> set[str]:
    imports = re.findall(rf"from {NAME} import (\([^)]*\)|.*)", sources)
    return {
        *re.findall(r"\b(?:tex|ext)\.([A-Za-z]\w+)", sources),
        *(name for names in imports for name in re.findall(r"[A-Za-z]\w+", names)),
    }


def _enumeration(name: str, sources: str) -> type[enum.IntEnum]:
    repeated = rf"^    \w+ = int\((?:tex\.)?{name}\.(\w+)\)"
    names = [name, *re.findall(rf"\b(\w+) = tex\.{name}$", sources, re.MULTILINE)]
    mentioned = rf"\b(?:{'|'.join(names)})\.([A-Za-z]\w+)"
    members = re.findall(repeated if name in MIRRORED else mentioned, sources, re.MULTILINE)
    return enum.IntEnum(name, [*dict.fromkeys(members)], start=0)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{NAME}.{name} has no reference in tests/model/te/kernels.")

    refuse.__name__ = name
    return refuse


install()
