"""Labels of memory stand where it is allocated, each is used, and they change no function."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mcore_qwen3vl import memory_labels
from mcore_qwen3vl.memory_labels import LABELS, label_at, memory_label
from tests.test_imports import sources


def declared() -> set[str]:
    """Return the labels that stand in calls of the two functions, anywhere in the package."""
    calls = (
        node
        for file in sources().values()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("label_module", "memory_label")
    )
    given = (call.args[-1] for call in calls)
    return {word.value for word in given if isinstance(word, ast.Constant) and word.value}


def test_every_label_is_used_and_no_other() -> None:
    assert declared() == set(LABELS)


def undeclared(modules: dict[str, str]) -> list[str]:
    """Return the modules of ``model/`` that may allocate, as they import torch, without a label."""
    return [
        name
        for name, source in modules.items()
        if name.startswith("model.") and re.search(r"^(import|from) torch\b", source, re.MULTILINE)
        if not re.search(r"^label_module\(__file__, ", source, re.MULTILINE)
    ]


def test_every_module_of_the_model_declares_a_label() -> None:
    """The memory of a new one would otherwise be called other."""
    modules = {name: file.read_text(encoding="utf-8") for name, file in sources().items()}
    assert undeclared(modules) == []
    assert undeclared({**modules, "model.planted": "import torch\n"}) == ["model.planted"]


MODULE = """
from mcore_qwen3vl.memory_labels import label_module, memory_label

label_module(__file__, "norms")

@memory_label("MLP")
def renamed(x):
    def inner():
        return x
    return inner

def other():
    return None
"""


def test_a_label_moves_with_its_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_labels, "_files", {})
    file = tmp_path / "module.py"
    found = []
    for before in ("", "\n\n\n"):
        module = ModuleType("module")
        module.__file__ = str(file)
        exec(compile(before + MODULE, str(file), "exec"), vars(module))
        found.append({n: label_at(str(file), n) for n in range(1, 16)})
        memory_labels._files.clear()
    assert [n for n, label in found[0].items() if label == "MLP"] == [6, 7, 8, 9, 10]
    assert [n for n, label in found[1].items() if label == "MLP"] == [9, 10, 11, 12, 13]
    assert set(found[0].values()) == {"MLP", "norms"}


def test_a_label_leaves_a_function_as_it_is() -> None:
    def function() -> None: ...

    assert memory_label("MLP")(function) is function
    assert sys.getrefcount(function) < 5  # nothing keeps it
