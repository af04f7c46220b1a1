"""Our legacy checkpoints and Megatron's own are the same, bit for bit, in both directions."""

from __future__ import annotations

import contextlib
import io
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters import legacy
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.legacy import check_run, saved_arguments
from mcore_qwen3vl.converters.storage.archive import load
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.training.arguments.parser import Parsed, validate
from mcore_qwen3vl.training.checkpoints.resume import checked_iteration
from mcore_qwen3vl.verification.curves import Job, train
from tests.converters.checkpoints import assert_same_tensors
from tests.converters.ranks import build_empty, check_chunks
from tests.training.log import numbers_of
from tests.turns import slow_except

CASES = [
    ("dense", "tp2xpp2"),
    ("dense-tied", "tp2xpp2xvpp2"),
    ("dense-tied", "single"),
    ("dense", "pp2+first1"),
    ("dense", "pp2+E|t|tt|tL"),
    ("moe", "tp2xpp2xep2+sp"),  # ETP 1: the TP ranks are the EP ranks
    ("moe", "tp2xpp2xep2xetp2xdp2+sp"),  # ETP equals TP, Megatron's default: 8 ranks
    ("moe", "tp2xetp2+sp"),
    ("mixed-listed", "pp2xep2xdp2"),
]
FAST = [("dense-tied", "tp2xpp2xvpp2"), ("dense", "pp2+E|t|tt|tL"), ("moe", "tp2xpp2xep2+sp")]


def arguments(source: Path, layout: Layout, *flags: str) -> Parsed:
    """Return the arguments of a training run."""
    words = ["--cpu", "--hf-model", str(source), "--seq-length", "128", "--micro-batch-size", "1"]
    words += ["--train-iters", "1", "--lr", "1", "--ckpt-format", "torch"]
    words += ["--global-batch-size", str(4 * layout.dp)]
    words += [*layout.flags(moe=True), *flags]
    return validate(words, layout.world_size)


def start(layout: Layout, args: Namespace) -> list[Any]:
    """Start this rank of a run, up to a model without weights."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training.global_vars import set_args

    initialize(layout)
    set_args(args)
    init_num_microbatches_calculator(0, None, args.global_batch_size, 1, layout.dp)
    return build_empty(layout, Architecture.from_hf(args.hf_model))


@pytest.mark.parametrize(("case", "layout"), slow_except(CASES, *FAST))
def test_megatron_loads_what_was_converted_and_saves_the_same(tiny, tmp_path, case, layout):
    source, layout = tiny(case), Layout.parse(layout)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    hf_to_mcore(source, ours, format="torch", layout=layout, spec="torch")
    flags = ("--load", str(ours), "--save", str(theirs), "--save-interval", "1")
    args = arguments(source, layout, *flags).args

    def on_rank() -> tuple[int, str]:
        from megatron.training.checkpointing import load_checkpoint, save_checkpoint

        chunks, said = start(layout, args), io.StringIO()
        with contextlib.redirect_stdout(said):
            assert load_checkpoint(chunks, None, None) == (0, 0)
            save_checkpoint(7, chunks, None, None, 0)
        return check_chunks(chunks, source), said.getvalue()

    ranks = run_layout(on_rank, layout.world_size)
    assert min(compared for compared, _ in ranks) > 10
    said = "".join(text for _, text in ranks)
    assert "successfully loaded checkpoint" in said
    assert "load_return" not in said  # Megatron prints this when strict loading has failed
    assert_same_legacy(theirs / "iter_0000007", ours / "release")
    mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert_same_tensors(source, tmp_path / "back")


def assert_same_legacy(theirs: Path, ours: Path) -> None:
    """Check that files and parameters are the same, and that all of our arguments are in theirs."""
    names = {str(file.relative_to(theirs)) for file in theirs.rglob("*.pt")}
    assert names == {str(file.relative_to(ours)) for file in ours.rglob("*.pt")}
    for name in names:
        want, found = load(theirs / name), load(ours / name)
        assert found["checkpoint_version"] == want["checkpoint_version"]
        models = [key for key in want if key.startswith("model")]
        assert models == [key for key in found if key.startswith("model")]
        for key in models:
            assert set(found[key]) == set(want[key])
            for parameter, value in want[key].items():
                same = value is found[key][parameter] is None
                assert same or torch.equal(value, found[key][parameter]), f"{name} {parameter}"
        stated, given = vars(found["args"]), vars(want["args"])
        assert {k: v for k, v in stated.items() if given[k] != v} == {}


def test_a_training_checkpoint_with_optimizer_state_exports_as_the_live_model(tiny, data, tmp_path):
    job = Job(tiny("dense"), data, Layout.parse("tp2xpp2"), steps=1)
    train(
        job, tmp_path / "run", "--ckpt-format", "torch", "--use-distributed-optimizer",
        "--save", str(tmp_path / "save"), "--save-interval", "1", "--save-hf", str(tmp_path / "hf"),
    )  # fmt: skip
    (live,) = (folder.parent for folder in (tmp_path / "hf").rglob("config.json"))
    mcore_to_hf(tmp_path / "save", tmp_path / "back", hf_config=tiny("dense"))
    assert_same_tensors(live, tmp_path / "back")


@pytest.mark.slow
def test_training_from_a_converted_checkpoint_is_training_from_the_hf_one(tiny, data, tmp_path):
    layout, other = Layout.parse("tp2xpp2"), tmp_path / "other"
    write_tiny_checkpoint(other, seed=8)
    expected = train(Job(other, data, layout, steps=1), tmp_path / "hf")
    # It starts from other weights, unless --load replaces them.
    job = Job(tiny("dense"), data, layout, steps=1)
    for format, choice in (("torch_dist", {}), ("torch", {"layout": layout, "spec": "torch"})):
        mcore = tmp_path / format
        hf_to_mcore(other, mcore, format=format, **choice)
        flags = ("--load", str(mcore), "--ckpt-format", format)
        found = train(job, tmp_path / f"run-{format}", *flags)
        assert numbers_of(found) == numbers_of(expected)


@pytest.mark.parametrize(
    ("case", "layout", "difference"),
    [
        ("dense", "pp2", "tensor_model_parallel_size 2 instead of 1"),
        ("dense", "tp2", "pipeline_model_parallel_size 2 instead of 1"),
        ("dense", "tp2xpp2xvpp2", "virtual_pipeline_model_parallel_size None instead of 2"),
        ("dense", "tp2xpp2+first1", "decoder_first_pipeline_num_layers None instead of 1"),
        ("dense", "tp2xpp2+Et|tttL", "pipeline_model_parallel_layout None instead of Et|tttL"),
        ("moe", "tp2xpp2xep2+sp", "expert_tensor_parallel_size 2 instead of 1"),
    ],
)
def test_a_run_of_another_layout_is_refused(tiny, tmp_path, case, layout, difference):
    layout = Layout.parse(layout)
    saved = Layout(tp=2, pp=2, ep=layout.ep, etp=2 if case == "moe" else 1)
    hf_to_mcore(tiny(case), tmp_path / "mcore", format="torch", layout=saved, spec="torch")
    with pytest.raises(BadInput, match=re.escape(f"saved with {difference}")):
        check_run(tmp_path / "mcore" / "release", arguments(tiny(case), layout).args)


def test_a_step_that_is_named_is_checked_too(tiny, tmp_path):
    folder, saved = tmp_path / "mcore", Layout(tp=2)
    hf_to_mcore(tiny("dense"), folder, format="torch", layout=saved, spec="torch")
    (folder / "release").rename(folder / "iter_0000003")
    run = arguments(tiny("dense"), Layout(), "--load", str(folder), "--ckpt-step", "3")
    with pytest.raises(BadInput, match="tensor_model_parallel_size 2 instead of 1"):
        checked_iteration(run.settings.checkpoints, run.args, fallback=True)


def test_an_optimizers_state_of_single_experts_is_refused(tiny, tmp_path, monkeypatch):
    """With the distributed optimizer it would load, in the wrong order."""
    hf_to_mcore(tiny("moe"), tmp_path / "mcore", format="torch", layout=Layout(), spec="torch")
    release = tmp_path / "mcore" / "release"
    trained = release.rename(release.with_name("iter_0000003"))
    args = arguments(tiny("moe"), Layout()).args
    check_run(trained, args)
    saved = Namespace(**{**vars(saved_arguments(trained)), "moe_grouped_gemm": False})
    monkeypatch.setattr(legacy, "saved_arguments", lambda folder: saved)
    with pytest.raises(BadInput, match=r"each expert is a parameter of its own.*--no-load-optim"):
        check_run(trained, args)
    check_run(trained, Namespace(**{**vars(args), "no_load_optim": True}))
    check_run(trained, Namespace(**{**vars(args), "finetune": True}))
    check_run(trained.rename(release), args)  # a conversion, without an optimizer


def test_a_run_of_another_spec_is_refused_before_megatron_loads_half(tiny, data, tmp_path):
    hf_to_mcore(tiny("dense"), tmp_path / "mcore", format="torch", layout=Layout(), spec="te")
    job = Job(tiny("dense"), data, steps=1)
    with pytest.raises(BadInput, match=r"spec \['te'\] instead of \['torch'\]"):
        train(job, tmp_path / "run", "--load", str(tmp_path / "mcore"))
