"""Holders of memory are named by labels of the code and by libraries' modules that exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from mcore_qwen3vl.data import sharing
from mcore_qwen3vl.model import log_probs, qwen3vl, vision
from mcore_qwen3vl.model.decoder import layer
from mcore_qwen3vl.rehearsal import holders, stubs
from mcore_qwen3vl.simulated_gpu import integers
from tests.test_memory_labels import declared

MEASURED_BY_STORAGE = {holders.WEIGHTS, holders.GRADIENTS, holders.OPTIMIZER, holders.FROZEN}
"""What no label names: what lasts is known by its storage."""


def test_every_holder_of_a_report_is_used_and_no_other() -> None:
    named = {*declared(), *holders.OF_LIBRARIES.values(), holders.TEMPORARY}
    assert named | MEASURED_BY_STORAGE == set(holders.HOLDERS)


def test_the_modules_of_libraries_exist() -> None:
    assert [name for name in holders.OF_LIBRARIES if find_spec(name) is None] == []


def frame_of(function: Callable[..., Any], word: str) -> dict[str, Any]:
    """Return the frame in which `function` runs its first line with `word`."""
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
        (log_probs.token_log_probs, "return", "logits and loss"),
        (sharing.SharedBatches._broadcast_patches, "empty_like", "batch"),
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
