"""No package uses a private name of another: what is shared has a public one.

The packages are the folders and modules of ``mcore_qwen3vl/``, ``converters`` among them. A name is
private if it begins with one underscore. The test knows names and no types: it misses the use of a
name that the user's own package defines as well.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest

from tests.test_imports import sources

OF_TORCH = frozenset({"_base", "_dtype"})
"""Attributes of tensors and storages that some class of ours has, too."""

TAKE_NAMES = frozenset({"getattr", "setattr", "delattr", "hasattr", "object", "attrgetter"})
"""Functions to which the name of an attribute is given; ``object`` is that of ``mock.patch``."""


def package_of(module: str) -> str:
    return module.partition(".")[0]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module defines: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


def used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each attribute, imported name, and word that may name one.

    Such words are given to :data:`TAKE_NAMES`, or stand in a tuple of what is to be patched.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and _name_of(node.func) in TAKE_NAMES:
            yield from _words(node.args)
        elif isinstance(node, ast.Tuple):
            yield from _words(node.elts)


def _name_of(function: ast.expr) -> str:
    """Return the last part of a function's name."""
    return ast.unparse(function).rpartition(".")[2]


def _words(values: list[ast.expr]) -> Iterator[tuple[int, str]]:
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value


def trespasses(modules: Mapping[str, str]) -> list[str]:
    """Return the uses of a private name that other packages define, and the user's does not."""
    trees = {module: ast.parse(source) for module, source in modules.items()}
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for name in filter(is_private, defined(tree)):
            owners[name].add(package_of(module))
    return [
        f"{module}:{line} uses {name} of {', '.join(sorted(owners[name]))}"
        for module, tree in trees.items()
        for line, name in used(tree)
        if is_private(name) and name not in OF_TORCH
        if owners[name] and package_of(module) not in owners[name]
    ]


@pytest.fixture(scope="module")
def modules() -> dict[str, str]:
    return {name: file.read_text(encoding="utf-8") for name, file in sources().items()}


def test_no_package_uses_a_private_name_of_another(modules: dict[str, str]) -> None:
    assert trespasses(modules) == []


@pytest.mark.parametrize(
    "line",
    [
        "from mcore_qwen3vl.runtime.launch import _count_gpus",
        "def f(run):\n    return run._signal_exit_code()",
        "def f(freezing):\n    freezing._used |= {'a'}",
        "def f():\n    mock.patch.object(Run, '_report', None)",
        "def f():\n    return ((run.Run, '_report', 1),)",
    ],
)
def test_a_planted_use_is_found(modules: dict[str, str], line: str) -> None:
    planted = {**modules, "rehearsal.planted": line}
    (found,) = trespasses(planted)
    assert found.startswith("rehearsal.planted:")
