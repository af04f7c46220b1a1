"""Memory is named by labels that stand in the code, and by libraries' modules that exist."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mcore_qwen3vl import memory_labels
from mcore_qwen3vl.memory_labels import LABELS, label_at, memory_label
from mcore_qwen3vl.model import head, qwen3vl, vision
from mcore_qwen3vl.model.decoder import layer
from mcore_qwen3vl.rehearsal import holders, stubs
from mcore_qwen3vl.simulated_gpu import integers
from mcore_qwen3vl.training import data_provider
from tests.test_imports import sources

MEASURED_BY_STORAGE = {holders.WEIGHTS, holders.GRADIENTS, holders.OPTIMIZER, holders.FROZEN}
"""What no label names: what lasts is known by its storage."""


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


def test_every_holder_of_a_report_is_used_and_no_other() -> None:
    named = {*declared(), *holders.OF_LIBRARIES.values(), holders.TEMPORARY}
    assert named | MEASURED_BY_STORAGE == set(holders.HOLDERS)


def test_the_modules_of_libraries_exist() -> None:
    assert [name for name in holders.OF_LIBRARIES if find_spec(name) is None] == []


def frame_of(function: Callable[..., Any], word: str) -> dict[str, Any]:
    """Return the frame in which `function` runs its first line that has `word`."""
    lines, first = inspect.getsourcelines(function)
    at = next(i for i, line in enumerate(lines) if word in line)
    file = inspect.getsourcefile(function)
    return {"filename": file, "line": first + at, "name": function.__name__}


def library_frame(file: str) -> dict[str, Any]:
    return {"filename": f"/somewhere/site-packages/{file}", "line": 1, "name": "forward"}


@pytest.mark.parametrize(
    ("function", "word", "holder"),
    [
        (qwen3vl.fuse, "index_copy", "embedding"),
        (qwen3vl.FusionPlan.select, "index_select", "embedding"),
        (qwen3vl.Qwen3VLModel._embed, "torch.stack", "model, other"),
        (layer.add_to_rows, "index_add", "embedding"),
        (layer.pack_features, "torch.cat", "residual stream"),
        (vision.VisionTower.forward, "return", "vision tower"),
        (head.token_log_probs, "return", "logits and loss"),
        (data_provider.SharedBatches._broadcast_patches, "empty_like", "batch"),
    ],
)
def test_a_function_is_labelled_where_it_is_defined(
    function: Callable[..., Any], word: str, holder: str
) -> None:
    assert holders.holder_of([frame_of(function, word)]) == holder


def test_who_allocates_for_a_caller_has_its_label() -> None:
    mlp = library_frame("megatron/core/transformer/mlp.py")
    inner = [
        frame_of(integers.host_view, "return"),
        frame_of(stubs.Buffer.dispatch, "new_empty"),
        library_frame("megatron/core/tensor_parallel/mappings.py"),
        library_frame("transformer_engine/pytorch/module/linear.py"),
    ]
    assert holders.holder_of([*inner, mlp, frame_of(vision.VisionTower.forward, "return")]) == "MLP"
    assert holders.holder_of(inner) == holders.TEMPORARY


def test_a_packages_name_is_no_prefix_of_another() -> None:
    assert holders.holder_of([library_frame("megatron/core/optimizer/muon.py")]) != "MLP"
    assert holders.holder_of([library_frame("megatron/core/optimizer_other.py")]) == (
        holders.TEMPORARY
    )


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
