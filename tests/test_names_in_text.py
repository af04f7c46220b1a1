"""Names of this package in docstrings and in the documentation's imports are names that exist."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mcore_qwen3vl"
SOURCES = sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "converters").rglob("*.py")})
_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr|exc):`~?([.\w]+)`")
_IMPORT = re.compile(r"^ *from (mcore_qwen3vl[\w.]*) import ([\w, ]+)$", re.MULTILINE)


@cache
def defined(source: Path) -> frozenset[str]:
    """Return the names that a module defines, and those of its classes behind the class."""
    return frozenset(_defined(ast.parse(source.read_text("utf-8"))))


def _defined(scope: ast.Module | ast.ClassDef, before: str = "") -> Iterator[str]:
    for node in scope.body:
        match node:
            case ast.ClassDef():
                yield before + node.name
                yield from _defined(node, f"{before}{node.name}.")
                yield from _set_in_init(node, f"{before}{node.name}.")
            case ast.FunctionDef():
                yield before + node.name
            case ast.Assign():
                yield from (before + t.id for t in node.targets if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.TypeAlias(name=ast.Name(id=name)):
                yield before + name


def _set_in_init(owner: ast.ClassDef, before: str) -> Iterator[str]:
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield before + node.attr


def exists(name: str, source: Path) -> bool:
    """Return whether a role's name, in a docstring of `source`, names something.

    A name that begins with a dot is looked for everywhere, with or without its module before it.
    Another name is one that its module defines or imports, or it is of another package.
    """
    if name.startswith("mcore_qwen3vl."):
        return _is_importable(name)
    first, *rest = (part for part in name.split(".") if part)
    if not name.startswith("."):
        if first in _imported(source) or first in sys.stdlib_module_names:
            return True
        if rest and first.islower():
            return True
        return any(one == name or one.endswith(f".{name}") for one in defined(source))
    modules = [file for file in SOURCES if file.stem == first]
    if modules and (not rest or any(".".join(rest) in defined(file) for file in modules)):
        return True
    if any(file.with_suffix("").parts[-1 - len(rest) :] == (first, *rest) for file in SOURCES):
        return True
    whole = ".".join((first, *rest))
    return any(whole in defined(file) or _inherits(whole, file) for file in SOURCES)


@cache
def _imported(source: Path) -> frozenset[str]:
    """Return the names that a module imports."""
    nodes = ast.walk(ast.parse(source.read_text("utf-8")))
    imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    return frozenset(one.asname or one.name.split(".")[0] for node in imports for one in node.names)


def _inherits(name: str, source: Path) -> bool:
    """Return whether `name` is a class of `source` with a member that one of its bases has."""
    owner, _, member = name.rpartition(".")
    if not owner or owner not in defined(source):
        return False
    return any(one.endswith(f".{member}") for file in SOURCES for one in defined(file))


def _is_importable(name: str) -> bool:
    module, rest = name, list[str]()
    while module:
        try:
            found: object = import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
            continue
        for part in rest:
            if not hasattr(found, part):
                return part in getattr(found, "__annotations__", ())
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("source", SOURCES, ids=lambda one: str(one.relative_to(ROOT)))
def test_names_in_docstrings_exist(source: Path) -> None:
    named = set(_ROLE.findall(source.read_text("utf-8")))
    assert not {name for name in named if not exists(name, source)}


def test_imports_in_the_documentation_exist() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        (page.name, f"{module}.{name.strip().split(' as ')[0]}")
        for page in pages
        for module, names in _IMPORT.findall(page.read_text("utf-8"))
        for name in names.split(",")
    ]
    assert len(found) > 10
    assert not [one for one in found if not _is_importable(one[1])]
