"""Megatron's own loader and ours load checkpoints strictly, each rank exactly its part."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.export import export_hf
from mcore_qwen3vl.converters.live import load_checkpoint, load_hf
from mcore_qwen3vl.converters.mapping.table import extra_state_keys
from mcore_qwen3vl.converters.offline import to_mcore
from mcore_qwen3vl.converters.torch_dist import TorchDistCheckpoint
from mcore_qwen3vl.converters.torch_pickle import guard_reads
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, TaskModel, build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from tests.converters.checkpoints import assert_same_files, assert_same_tensors, load
from tests.converters.forms import FORMS
from tests.converters.ranks import build_empty, check_chunks
from tests.turns import slow_except

Tiny = Callable[[str], Path]


def load_strictly(chunks: list[Any], checkpoint: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    guard_reads()  # without it, megatron-core 0.19 reads no checkpoint under torch 2.15
    state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(
        state, str(checkpoint / "release"), strict=StrictHandling.RAISE_ALL
    )
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"])


def check_rank(layout: Layout, source: Path, checkpoint: Path) -> int:
    """Load and compare, and return how many parameters this rank compared."""
    initialize(layout)
    chunks = build_empty(layout, Architecture.from_hf(source))
    load_strictly(chunks, checkpoint)
    return check_chunks(chunks, source)


LAYOUTS = [
    ("dense", Layout(pp=2, vpp=2)),
    ("dense-tied", Layout(pp=2)),
    ("dense-v5", Layout()),
    ("moe", Layout(tp=2, ep=2, dp=2, sp=True)),
    ("moe", Layout(tp=2, etp=2, sp=True)),
    ("moe", Layout(tp=2, pp=2, ep=2, sp=True)),
    ("moe-v5", Layout(tp=2, etp=2, sp=True)),
    ("moe-v5", Layout(ep=4, dp=4)),
    ("moe-H=2I", Layout()),
    ("moe-H=2I-v5", Layout()),
    ("moe-H=I", Layout()),
    ("moe-H=I-v5", Layout()),
    ("mixed-listed", Layout(pp=2, tp=2, sp=True)),
    ("mixed-step-v5", Layout(ep=2, dp=2)),
    ("bf16-sharded", Layout(ep=2, dp=2)),
]
FAST = [
    ("dense", Layout(pp=2, vpp=2)),
    ("moe", Layout(tp=2, pp=2, ep=2, sp=True)),
    ("moe-H=I", Layout()),
    ("mixed-step-v5", Layout(ep=2, dp=2)),
]


@pytest.mark.parametrize(("case", "layout"), slow_except(LAYOUTS, *FAST), ids=str)
def test_every_rank_holds_its_part(
    tiny: Tiny, converted: Callable[[str], Path], case: str, layout: Layout
) -> None:
    compared = run_layout(check_rank, layout.world_size, layout, tiny(case), converted(case))
    assert min(compared) > 10


def save_rank(layout: Layout, source: Path, checkpoint: Path, out: Path) -> None:
    """Load, then save like a training run, with optimizer state beside the model."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    initialize(layout)
    chunks = build_empty(layout, Architecture.from_hf(source))
    load_strictly(chunks, checkpoint)
    state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    moment = torch.full((layout.world_size, 5), 3.0)
    rank = torch.distributed.get_rank()
    state["optimizer"] = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.output_layer.weight",
        moment[rank : rank + 1],
        (0, rank, layout.world_size),
    )
    state["iteration"] = 7
    dist_checkpointing.save(state, str(out / "iter_0000007"))


SAVED = [
    ("dense", Layout(tp=2, pp=2)),
    ("dense-tied", Layout(pp=2, vpp=2)),
    ("moe", Layout(tp=2, ep=2, sp=True, dp=2)),
    ("moe-v5", Layout(tp=2, etp=2, sp=True)),
    ("mixed-listed", Layout(pp=2)),
]


@pytest.mark.parametrize(("case", "layout"), slow_except(SAVED, SAVED[1]), ids=str)
def test_what_megatron_saves_at_a_layout_exports_bitwise(
    tiny: Tiny, converted: Callable[[str], Path], tmp_path: Path, case: str, layout: Layout
) -> None:
    trained = tmp_path / "trained"
    (trained / "iter_0000007").mkdir(parents=True)
    run_layout(save_rank, layout.world_size, layout, tiny(case), converted(case), trained)
    (trained / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(BadInput, match="--hf-config"):
        mcore_to_hf(trained, tmp_path / "back")
    mcore_to_hf(trained, tmp_path / "back", hf_config=tiny(case))
    assert_same_tensors(tiny(case), tmp_path / "back")
    assert_same_files(tiny(case), tmp_path / "back")


def stored(chunks: list[Any]) -> tuple[dict[str, Any], set[str]]:
    """Return tensors (shape and dtype) and objects of the model's own sharded state dict."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        apply_factories,
    )

    state = {str(i): chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    apply_factories(state)
    values = list(nested_values(state))
    tensors = [v for v in values if isinstance(v, ShardedTensor)]
    objects = [v for v in values if isinstance(v, ShardedObject)]
    assert len(tensors) + len(objects) == len(values)
    shapes = {t.key: (tuple(t.global_shape), t.dtype) for t in tensors}
    return shapes, {o.unique_key for o in objects}


def keys_on_one_rank(source: Path) -> tuple[dict[str, Any], set[str]]:
    initialize(Layout())
    return stored(build_empty(Layout(), Architecture.from_hf(source)))


@pytest.mark.parametrize("case", ["dense", "dense-tied", "moe", "mixed-listed", "mixed-step-v5"])
def test_keys_shapes_and_dtypes_are_the_models(
    tiny: Tiny, converted: Callable[[str], Path], case: str
) -> None:
    [(shapes, objects)] = run_layout(keys_on_one_rank, 1, tiny(case))
    index = TorchDistCheckpoint(converted(case) / "release").index
    assert {key: (t.shape, t.dtype) for key, t in index.tensors.items()} == shapes
    assert set(index.objects) == objects | {"common_state/shard_0_1"}
    assert set(extra_state_keys(Architecture.from_hf(tiny(case)))) == objects


@pytest.mark.parametrize("case", ["dense", "dense-tied", "moe", "mixed-listed"])
def test_keys_shapes_and_dtypes_are_the_te_specs(
    converted: Callable[[str], Path], case: str
) -> None:
    """They equal the listing that `te_keys.py` made from Transformer Engine's modules."""
    listing = json.loads((Path(__file__).parent / "te-keys.json").read_text())[case]
    index = TorchDistCheckpoint(converted(case) / "release").index
    found = {key: [list(t.shape), str(t.dtype)] for key, t in index.tensors.items()}
    assert found == listing["tensors"]
    assert set(index.objects) == {*listing["objects"], "common_state/shard_0_1"}


def build(config: Path):
    return Qwen3VLModel.from_hf_config(Architecture.from_hf(config))


def load_into(config: Path, checkpoint: Path) -> None:
    initialize(Layout())
    load_checkpoint([build(config)], checkpoint)


def load_with_few_descriptors(mcore_dense: Path, checkpoint: Path) -> None:
    """Load into a process that may open 20 files more; each rank of a run saves at least one."""
    initialize(Layout())
    model = build(mcore_dense / "hf")
    assert len(list(checkpoint.rglob("*.distcp"))) > 40
    most = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    load_checkpoint([model], checkpoint)


def test_more_files_than_a_process_may_have_open(
    tiny: Tiny, mcore_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_mcore, "unit_bytes", lambda total: 1)
    hf_to_mcore(tiny("dense"), tmp_path / "mcore")
    run_layout(load_with_few_descriptors, 1, mcore_dense, tmp_path / "mcore")


def test_another_model_is_refused(mcore_dense, tmp_path):
    other = write_tiny_checkpoint(tmp_path / "other", tie=True)
    with pytest.raises(BadInput, match=r"holds the tensor output_layer\.weight"):
        run_layout(load_into, 1, other, mcore_dense)


def filled(source: Path, checkpoint: Path, kind: type[Qwen3VLModel]) -> int:
    initialize(Layout())
    chunks = build_empty(Layout(), Architecture.from_hf(source), kind=kind)
    load_checkpoint(chunks, checkpoint)
    return check_chunks(chunks, source)


@pytest.mark.parametrize("kind", [Qwen3VLModel, TaskModel])
def test_a_padded_vocabulary_and_a_head_that_the_model_lacks(tiny, tmp_path, kind):
    source = tiny("dense")
    hf_to_mcore(source, tmp_path / "mcore", make_vocab_size_divisible_by=100)
    (compared,) = run_layout(filled, 1, source, tmp_path / "mcore", kind)
    assert compared > 100


def test_no_checkpoint(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(BadInput, match="iter_0000012"):
        load_checkpoint([], tmp_path)


Make = Callable[[str], Path]


@pytest.mark.parametrize("name", ["before the move", "head stored though tied", "base, tied"])
def test_a_language_model_is_loaded(form: Make, tiny: Make, name: str) -> None:
    source, plain = form(name), tiny(FORMS[name].source)

    def on_rank() -> None:
        initialize(Layout())
        chunks = build_chunks(Architecture.from_hf(plain), Layout(), params_dtype=torch.float32)
        load_hf(chunks, source)
        found, expected = dict(export_hf(chunks)), load(plain)
        assert found.keys() == expected.keys()
        for tensor, value in expected.items():
            assert torch.equal(found[tensor], value), tensor

    run_layout(on_rank, 1, timeout=120)


def test_a_model_without_its_head_is_refused(form: Make, tiny: Make, tmp_path: Path) -> None:
    source, plain, mcore = form("base"), tiny("dense-v5"), tmp_path / "mcore"
    hf_to_mcore(source, mcore)

    def on_rank() -> None:
        initialize(Layout())
        chunks = build_chunks(Architecture.from_hf(plain), Layout(), params_dtype=torch.float32)
        with pytest.raises(BadInput, match=r"headless model.*Name a checkpoint that has one"):
            load_hf(chunks, source)
        with pytest.raises(BadInput, match=r"headless model.*Name a checkpoint that has one"):
            load_checkpoint(chunks, mcore)

    run_layout(on_rank, 1, timeout=120)
