"""A run or a model starts from what another project wrote or saved in training (`make_peers`)."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters import torch_dist
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.describe import inspect_path
from mcore_qwen3vl.converters.identify import TRACKER, PathKind, identify
from mcore_qwen3vl.converters.live import load_checkpoint, load_hf
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.inference import hf_folder_of
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.training.arguments.checks import check_surroundings
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.checkpoints.other_maker import checkpoint_of_other_maker
from mcore_qwen3vl.verification.audit import audit
from mcore_qwen3vl.verification.checkpoints import compare_checkpoints
from mcore_qwen3vl.verification.curves import Job, train
from mcore_qwen3vl.verification.parity.comparison import verify_parity
from mcore_qwen3vl.verification.trace.recording import WEIGHTS
from mcore_qwen3vl.verification.trace.tracing import trace
from tests.converters.checkpoints import assert_same_tensors, copy, load, save
from tests.converters.peers.make_peers import write_hf
from tests.converters.peers.test_peers import (
    HERE,
    MAKERS,
    PEERS,
    as_stored,
    source_of,
)
from tests.converters.ranks import build_empty
from tests.turns import slow_except


def loaded_both_ways(layout: Layout, peer: str, source: Path, overrides: dict[str, Any]) -> int:
    """Compare a model loaded from `peer` with one loaded from its source, and count parameters."""
    initialize(layout)
    ours, theirs = (
        build_empty(layout, Architecture.from_hf(source), **overrides) for _ in range(2)
    )
    load_hf(ours, source)
    load_checkpoint(theirs, HERE / peer)
    compared = 0
    for mine, other in zip(ours, theirs, strict=True):
        pairs = zip(mine.named_parameters(), other.named_parameters(), strict=True)
        for (name, want), (_, found) in pairs:
            assert torch.equal(want, found), name
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("peer", "layout", "overrides"),
    [
        ("megatron-bridge-dense", "single", {"vocab_size": 500}),
        ("megatron-bridge-dense", "tp2+sp", {"params_dtype": torch.float32}),
        ("megatron-bridge-moe", "tp2xep2+sp", {}),
        ("ms-swift-dense", "pp3", {}),
        ("ms-swift-dense", "tp2", {"vocab_size": 500}),
        ("ms-swift-moe", "ep2xdp2", {}),
        ("pai-megatron-patch-dense", "tp2+sp", {"vocab_size": 500}),
        ("pai-megatron-patch-moe", "pp3", {}),
        ("pai-megatron-patch-moe", "tp2xep2+sp", {}),
        ("ms-swift-hybrid_moe", "tp2xep2+sp", {"vocab_size": 500}),
        ("ms-swift-hybrid_moe", "pp2", {"params_dtype": torch.float32}),
    ],
)
def test_every_parameter_is_that_of_the_peers_source(
    peer: str, layout: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    sizes, source = Layout.parse(layout), as_stored(peer, tmp_path)
    ranks = run_layout(loaded_both_ways, sizes.world_size, sizes, peer, source, overrides)
    assert min(ranks) > 5


RUNS = [
    ("megatron-bridge-dense", "single"),
    ("megatron-bridge-dense", "pp3"),
    ("megatron-bridge-moe", "tp2xep2+sp"),
    ("ms-swift-dense", "tp2"),
    ("ms-swift-moe", "ep2xdp2"),
    ("pai-megatron-patch-dense", "pp3"),
    ("pai-megatron-patch-moe", "tp2xep2+sp"),
    ("ms-swift-hybrid_moe", "tp2+sp"),
]


def job_of(peer: str, layout: str, data: Path, folder: Path) -> Job:
    """Return a run of one step, whose ``--hf-model`` and ``--load-hf`` have other weights."""
    write_hf(folder / "model", peer.rpartition("-")[2], seed=99, dtype="float32")
    model = folder / "model"
    return Job(model, data, Layout.parse(layout), steps=1, batch=2)


def first_step(job: Job, folder: Path, *flags: str) -> tuple[float, float]:
    (entry,) = train(job, folder, *flags)
    return entry["lm loss"], entry["grad norm"]


@pytest.mark.parametrize(("peer", "layout"), slow_except(RUNS, RUNS[0]))
def test_a_run_starts_from_it_as_from_our_own_conversion(
    peer: str, layout: str, data: Path, tmp_path: Path
) -> None:
    hf_to_mcore(source_of(peer), tmp_path / "converted")
    job = job_of(peer, layout, data, tmp_path)
    want = first_step(job, tmp_path / "1", "--load", str(tmp_path / "converted"))
    assert first_step(job, tmp_path / "2", "--load", str(HERE / peer)) == want
    based = replace(job, converted=HERE / peer)
    save = ("--save", str(tmp_path / "save"), "--save-interval", "1")
    assert first_step(based, tmp_path / "3", *save) == want
    more = replace(based, steps=2, flags=("--override-opt-param-scheduler",))
    (second,) = train(more, tmp_path / "4", *save)
    assert second["iteration"] == 2  # it has resumed its own checkpoint


def arguments(model: Path, *flags: str) -> CommandLine:
    words = ["--cpu", "--hf-model", str(model), "--data-path", str(model), "--train-iters", "1"]
    return CommandLine([*words, *flags])


@pytest.mark.parametrize("peer", PEERS[::2])
def test_a_run_does_not_save_beside_it(peer: str, tmp_path: Path) -> None:
    save = copy(HERE / peer, tmp_path / "peer")
    refused = rf"{save} holds checkpoints of {re.escape(MAKERS[peer.rpartition('-')[0]])}: choose"
    for flags in (("--save", str(save)), ("--save", str(save), "--load", str(save))):
        with pytest.raises(BadInput, match=refused):
            check_surroundings(arguments(source_of(peer), *flags).settings)


def test_parity_and_trace_find_what_was_converted_wrongly(tmp_path: Path) -> None:
    peer, source, layout = HERE / "megatron-bridge-dense", HERE / "hf-dense", Layout.parse("tp2")
    assert verify_parity(source, layout, ["mixed"], gradients=False, checkpoint=peer).ok
    assert trace(source, peer, layout=layout).ok
    other, name = copy(source, tmp_path / "hf"), "model.visual.blocks.2.attn.proj.bias"
    tensors = load(other)
    tensors[name] += 1
    save(tensors, other)
    assert not verify_parity(other, None, ["mixed"], gradients=False, checkpoint=peer).ok
    found = trace(other, peer)
    assert [f.name for f in found.failures if f.part == WEIGHTS] == [name]


def test_parity_refuses_a_checkpoint_of_the_other_kind() -> None:
    with pytest.raises(BadInput, match="one is needed here: compare it with `verify tensors`"):
        verify_parity(HERE / "hf-dense", checkpoint=HERE / "hf-dense")


SOURCE = HERE / "hf-dense"


def saved_by_verl(root: Path, model: str) -> Path:
    actor = root / "global_step_20" / "actor"
    copy(HERE / "verl-dense" / "model", actor / model)
    (root / TRACKER).write_text("20")
    return actor


@pytest.mark.parametrize("model", ["", "model"])
def test_every_folder_is_understood(tmp_path: Path, model: str) -> None:
    actor = saved_by_verl(tmp_path / "run", model)
    folders = {tmp_path / "run", actor.parent, actor, actor / model, actor / model / "dist_ckpt"}
    for number, folder in enumerate(folders):
        mcore_to_hf(folder, out := tmp_path / f"out{number}")
        assert_same_tensors(SOURCE, out)
        assert inspect_path(folder).maker == MAKERS["verl"]
        assert hf_folder_of(folder, None, "generate") == actor / model / "huggingface"
        found = checkpoint_of_other_maker(
            arguments(SOURCE, "--load", str(folder)).settings.checkpoints
        )
        assert found is not None
        assert found.folder == actor / model / "dist_ckpt"


@pytest.mark.parametrize("model", ["", "model"])
def test_hugging_face_weights_are_named(tmp_path: Path, model: str) -> None:
    actor = saved_by_verl(tmp_path / "run", model)
    for file in (actor / model / "dist_ckpt").iterdir():
        file.unlink()  # VERL makes the folder all the same
    named = rf"saved by VERL.*: name {actor / model / 'huggingface'}\.$"
    for folder in (tmp_path / "run", actor.parent, actor, actor / model):
        with pytest.raises(BadInput, match=named):
            mcore_to_hf(folder, tmp_path / "out")
        with pytest.raises(BadInput, match=named):
            inspect_path(folder)


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
    assert identify(tmp_path / "again").kind is PathKind.HUGGINGFACE
    found = inspect_path(folder)
    assert found.maker == MAKERS[maker]
    assert found.total_parameters == sum(t.numel() for t in load(theirs).values())


@each_maker
def test_its_optimizer_state_is_not_resumed(maker: str, runs: Path, tmp_path: Path) -> None:
    run = run_of(maker, runs)
    load, refused = ("--load", str(run)), rf"written by {re.escape(MAKERS[maker])}, whose optimizer"
    with pytest.raises(BadInput, match=rf"{refused} state .* Add --finetune") as error:
        check_surroundings(arguments(START, *load).settings)
    assert "\n" not in str(error.value)
    for flags in ((*load, "--finetune"), ("--pretrained-checkpoint", str(run))):
        check_surroundings(arguments(START, *flags).settings)
        found = checkpoint_of_other_maker(arguments(START, *flags).settings.checkpoints)
        assert found is not None
        assert found.folder == iteration_of(run)
    theirs = exported(maker, runs, tmp_path / "theirs")
    assert run_layout(loads_as_exported, 1, Layout(), run, theirs) == [True]


def loads_as_exported(layout: Layout, run: Path, export: Path) -> bool:
    """Return whether a model has the same weights from the run's checkpoint and from its export."""
    initialize(layout)
    (chunk,), (expected,) = (build_empty(layout, Architecture.from_hf(START)) for _ in range(2))
    load_checkpoint([chunk], run)
    load_hf([expected], export)
    pairs = zip(chunk.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_the_checkpoint_of_a_run_of_ms_swifts_is_named(runs: Path) -> None:
    run = runs / "ms-swift-trained"
    copy(run / "checkpoint-2", run / "checkpoint-10")
    (run / "checkpoint-11").mkdir()  # is being written
    refused = rf"{run} is a run of ms-swift's, .* name {run / 'checkpoint-10'}\.$"
    with pytest.raises(BadInput, match=refused):
        inspect_path(run)
    with pytest.raises(BadInput, match=refused):
        check_surroundings(arguments(START, "--load", str(run), "--finetune").settings)
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
    check_surroundings(arguments(START, "--load-hf", str(saved)).settings)
    with pytest.raises(BadInput, match=r"is a Hugging Face checkpoint, .* use --load-hf"):
        check_surroundings(arguments(START, "--load", str(saved)).settings)


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
        check_surroundings(arguments(START, "--load", str(saved / below)).settings)
