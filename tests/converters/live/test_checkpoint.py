"""A running model loads exactly its own keys from a checkpoint, training state left aside."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.export import export_hf
from mcore_qwen3vl.converters.live import load_checkpoint, load_hf
from mcore_qwen3vl.converters.offline import to_mcore
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, TaskModel, build_chunks
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from tests.converters.checkpoints import load
from tests.converters.forms import FORMS
from tests.converters.ranks import build_empty, check_chunks


@pytest.fixture(scope="module", autouse=True)
def megatron():
    cpu.install()


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    hf_to_mcore(write_tiny_checkpoint(folder / "hf"), folder / "mcore")
    return folder / "mcore"


def build(config: Path):
    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

    return Qwen3VLModel.from_hf_config(Architecture.from_hf(config))


def saved_by_training(converted: Path, folder: Path) -> float:
    """Save with optimizer state, as training does, load that and return the largest difference."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    initialize(Layout())
    model = build(converted / "hf")
    load_checkpoint([model], converted)
    folder.mkdir()
    key = "optimizer.state.exp_avg.output_layer.weight"
    moment = ShardedTensor.from_rank_offsets(key, torch.full((1, 5), 3.0), (0, 0, 1))
    state = {"model": model.sharded_state_dict(), "optimizer": moment}
    dist_checkpointing.save(state, str(folder))
    again = build(converted / "hf")
    load_checkpoint([again], folder)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_optimizer_state_beside_the_model_is_left_alone(converted, tmp_path):
    assert run_layout(saved_by_training, 1, converted, tmp_path / "iteration") == [0.0]


def load_into(config: Path, checkpoint: Path) -> None:
    initialize(Layout())
    load_checkpoint([build(config)], checkpoint)


def load_with_few_descriptors(converted: Path, checkpoint: Path) -> None:
    """Load into a process that may open 20 files more; each rank of a run saves at least one."""
    initialize(Layout())
    model = build(converted / "hf")
    assert len(list(checkpoint.rglob("*.distcp"))) > 40
    most = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    load_checkpoint([model], checkpoint)


def test_more_files_than_a_process_may_have_open(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_mcore, "unit_bytes", lambda total: 1)
    hf_to_mcore(converted.parent / "hf", tmp_path / "mcore")
    run_layout(load_with_few_descriptors, 1, converted, tmp_path / "mcore")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"text": {"num_hidden_layers": 5}},
            r"decoder\.\S+ has shape \[4, .* but the Hugging Face config makes it \[5, ",
        ),
        ({"tie": True}, "holds the tensor output_layer.weight"),
        ({"vision": {"depth": 6}}, "lacks the tensor visual.blocks.5"),
    ],
)
def test_another_model_is_refused(converted, tmp_path, options, message):
    other = write_tiny_checkpoint(tmp_path / "other", **options)
    with pytest.raises(BadInput, match=message):
        run_layout(load_into, 1, other, converted)


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
