"""What Megatron-Bridge and ms-swift save in training, with optimizer state (`make_peers`)."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters import torch_dist
from mcore_qwen3vl.converters.convert import mcore_to_hf
from mcore_qwen3vl.converters.describe import inspect_path
from mcore_qwen3vl.converters.live import load_checkpoint
from mcore_qwen3vl.converters.place import TRACKER, Kind, identify
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.training.arguments.checks import check_surroundings
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.checkpoints.resume import from_other_maker
from mcore_qwen3vl.verify.audit import audit
from mcore_qwen3vl.verify.checkpoints import compare_checkpoints
from tests.converters.checkpoints import assert_same_tensors, copy, load
from tests.converters.peers.test_peers import HERE, MAKERS
from tests.converters.ranks import build_empty

START = HERE / "hf-small"
RUN = {"megatron-bridge": ".", "ms-swift": "checkpoint-2"}
EXPORT = {"megatron-bridge": "iter_0000002/hf", "ms-swift": "checkpoint-2"}
"""Below the run's folder: the Megatron checkpoint, and what the maker exported of it."""
each_maker = pytest.mark.parametrize("maker", RUN)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for maker in RUN:
        with tarfile.open(HERE / f"{maker}-trained.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder


def run_of(maker: str, runs: Path) -> Path:
    return runs / f"{maker}-trained" / RUN[maker]


def exported(maker: str, runs: Path, folder: Path) -> Path:
    """Return a copy of the maker's export without the Megatron checkpoint beside it."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(runs / f"{maker}-trained" / EXPORT[maker] / name, folder / name)
    return folder


def iteration_of(run: Path) -> Path:
    return run / "iter_0000002"


@each_maker
def test_it_holds_a_training_state_and_every_tensor_has_moved(maker: str, runs: Path) -> None:
    run = run_of(maker, runs)
    index = torch_dist.read_metadata(iteration_of(run))
    assert any(key.startswith("optimizer.") for key in index.tensors)
    assert any(key.startswith("rng_state/") for key in index.objects)
    result = compare_checkpoints(run, START)
    assert {f.name for f in result.failures if f.part == "tensors"} == load(START).keys()


@each_maker
@pytest.mark.parametrize("iteration", [False, True], ids=["run", "iteration"])
def test_it_is_bitwise_what_the_maker_exports(
    tmp_path: Path, maker: str, runs: Path, iteration: bool
) -> None:
    run, theirs = run_of(maker, runs), exported(maker, runs, tmp_path / "theirs")
    folder = iteration_of(run) if iteration else run
    mcore_to_hf(folder, tmp_path / "out", hf_config=START)
    assert_same_tensors(theirs, tmp_path / "out")
    assert compare_checkpoints(folder, theirs).ok
    mcore_to_hf(folder, tmp_path / "again")  # with the config of the export
    assert_same_tensors(theirs, tmp_path / "again")
    assert identify(tmp_path / "again").kind is Kind.HUGGINGFACE
    found = inspect_path(folder)
    assert found.maker == MAKERS[maker]
    assert found.total_parameters == sum(t.numel() for t in load(theirs).values())


def arguments(*flags: str) -> CommandLine:
    words = ["--cpu", "--hf-model", str(START), "--data-path", str(START), "--train-iters", "1"]
    return CommandLine([*words, *flags])


@each_maker
def test_its_optimizer_state_is_not_resumed(maker: str, runs: Path) -> None:
    run = run_of(maker, runs)
    load, refused = ("--load", str(run)), rf"written by {re.escape(MAKERS[maker])}, whose optimizer"
    with pytest.raises(BadInput, match=rf"{refused} state .* Add --finetune") as error:
        check_surroundings(arguments(*load).settings)
    assert "\n" not in str(error.value)
    for flags in ((*load, "--finetune"), ("--pretrained-checkpoint", str(run))):
        check_surroundings(arguments(*flags).settings)
        found = from_other_maker(arguments(*flags).settings.checkpoints)
        assert found is not None
        assert found.folder == iteration_of(run)
    assert run_layout(into_model, 1, Layout(), run) == [True]


def into_model(layout: Layout, run: Path) -> bool:
    initialize(layout)
    chunks = build_empty(layout, Architecture.from_hf(START))
    load_checkpoint(chunks, run)
    return all(p.isfinite().all() for chunk in chunks for p in chunk.parameters())


def test_the_checkpoint_of_a_run_of_ms_swifts_is_named(runs: Path) -> None:
    run = runs / "ms-swift-trained"
    copy(run / "checkpoint-2", run / "checkpoint-10")
    (run / "checkpoint-11").mkdir()  # is being written
    refused = rf"{run} is a run of ms-swift's, .* name {run / 'checkpoint-10'}\.$"
    with pytest.raises(BadInput, match=refused):
        inspect_path(run)
    with pytest.raises(BadInput, match=refused):
        check_surroundings(arguments("--load", str(run), "--finetune").settings)
    for compare in (compare_checkpoints, audit):
        with pytest.raises(BadInput, match=refused):
            compare(run, START)


def without_megatron(runs: Path, folder: Path, *, iteration: bool) -> Path:
    """Return what ms-swift writes without optimizer state, or after it has merged an adapter."""
    saved = exported("ms-swift", runs, folder)
    (saved / TRACKER).write_text("2")
    if iteration:
        iteration_of(saved).mkdir()
        torch.save({"iteration": 2}, iteration_of(saved) / "common.pt")
    return saved


@pytest.mark.parametrize("iteration", [True, False], ids=["no_save_optim", "merged"])
def test_hugging_face_weights_beside_a_tracker_are_read(
    tmp_path: Path, runs: Path, iteration: bool
) -> None:
    saved = without_megatron(runs, tmp_path / "saved", iteration=iteration)
    theirs = exported("ms-swift", runs, tmp_path / "theirs")
    assert compare_checkpoints(saved, theirs).ok
    assert inspect_path(saved).kind == "huggingface"
    assert identify(saved).config() == saved
    check_surroundings(arguments("--load-hf", str(saved)).settings)
    with pytest.raises(BadInput, match=r"is a Hugging Face checkpoint, .* use --load-hf"):
        check_surroundings(arguments("--load", str(saved)).settings)


@pytest.mark.parametrize("below", ["", "iter_0000002"])
def test_an_adapter_of_ms_swifts_is_refused_as_weights(
    tmp_path: Path, runs: Path, below: str
) -> None:
    saved = copy(run_of("ms-swift", runs), tmp_path / "saved")
    (saved / "model.safetensors").unlink()
    (saved / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    refused = rf"holds a LoRA adapter, .*`mcore-qwen3vl lora merge BASE {saved} OUT`"
    with pytest.raises(BadInput, match=refused):
        mcore_to_hf(saved / below, tmp_path / "out", hf_config=START)
    with pytest.raises(BadInput, match=refused):
        check_surroundings(arguments("--load", str(saved / below)).settings)
