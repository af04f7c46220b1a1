"""What we use of megatron-energon beyond its documented interface is there, as it was tested."""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib import import_module
from typing import Any

import pytest

from mcore_qwen3vl.files import package_modules
from tests.training.megatron_symbols import differences

SYMBOLS = {
    "megatron.energon.wrappers.packing_dataset.PackingDataset._fill_reading_buffer": (
        "(self, source_iter, log_progress=False)"
    ),
    "megatron.energon.wrappers.packing_dataset.PackingDataset.reset_state_own": "(self)",
    "megatron.energon.wrappers.base.get_sample_restore_key": "(sample)",
    "megatron.energon.savable_loader.SavableDataLoader.save_state_rank": "(self)",
    "megatron.energon.savable_loader.SavableDataLoader.restore_state_rank": "(self, state)",
}
"""Functions that we override or call, with their arguments in the tests' energon."""
ATTRIBUTES = {
    "megatron.energon.wrappers.packing_dataset.PackingDataset": (
        *("_savable_fields", "_reading_buffer", "_pre_packing_buffer", "_pre_packing_lengths"),
        *("dataset", "buffer_size", "worker_config", "final_packer", "final_packer_stateless"),
        *("sample_encoder", "sample_encoder_stateless", "sample_encoder_failure_tolerance"),
        *("pre_packer_failure_tolerance", "final_packer_failure_tolerance"),
    ),
    "megatron.energon.wrappers.buffer.SavableSampleBuffer": ("_restore_keys",),
    "megatron.energon.savable_loader.SavableDataLoader": (
        *("_worker_sample_counters", "_next_worker_id"),
    ),
    "megatron.energon.savable_loader.SavableDatasetWrapper": (
        *("_workers_restore_from", "_worker_offset", "_last_checkpoints"),
    ),
}
"""Attributes of their objects that we read or set."""
OF_OTHERS = {
    *("_exit", "_calculate_timestamps", "_new_shared", "_typed_storage"),
    *("_fuse_mean_std_and_rescale_factor", "_load_sample"),
}
"""Private names of other libraries than energon, and of energon's JSONL data set, which is given a
decoder before it is used."""


def test_canary_each_function_takes_what_we_were_tested_with() -> None:
    assert differences(SYMBOLS) == []


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_canary_each_attribute_is_set_by_its_class(owner: str) -> None:
    module, _, name = owner.rpartition(".")
    assert set(ATTRIBUTES[owner]) - _attributes(getattr(import_module(module), name)) == set()


def _attributes(owner: type[Any]) -> set[str]:
    """Return the names that a class and its bases declare, or set on their objects."""
    found: set[str] = set()
    for each in inspect.getmro(owner)[:-1]:
        found |= {*vars(each), *inspect.get_annotations(each)}
        if each.__module__.startswith("megatron.energon"):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each)))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
    return found


def test_the_canary_knows_every_private_attribute_that_the_data_code_uses() -> None:
    modules = package_modules().items()
    trees = {path: ast.parse(file.read_text("utf-8")) for path, file in modules}
    ours = {name for tree in trees.values() for node in ast.walk(tree) for name in _named_by(node)}
    known = ours | OF_OTHERS | {name for names in ATTRIBUTES.values() for name in names}
    used = {
        node.attr
        for path, tree in trees.items()
        if "data" in path.split("/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[1] != "_"
    }
    assert used - known == set()


def _named_by(node: ast.AST) -> list[str]:
    """Return the names that a statement of ours defines, attributes of ``self`` among them."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
    return []
