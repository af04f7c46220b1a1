"""Megatron's legacy format is written and read without Megatron, and can be taken out."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import mcore_qwen3vl
from mcore_qwen3vl import converters
from mcore_qwen3vl.cli.app import app
from mcore_qwen3vl.converters.convert import (
    hf_to_mcore,
    mcore_to_hf,
    plan_hf_to_mcore,
    plan_mcore_to_hf,
)
from mcore_qwen3vl.converters.describe import inspect_path
from mcore_qwen3vl.converters.storage.archive import PickledObject, as_bytes, load
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verification.checkpoints import check_manifest, compare_checkpoints
from tests.converters.checkpoints import CASES, Call, assert_same_files, assert_same_tensors
from tests.turns import slow_except

Tiny = Callable[[str], Path]
LAYOUTS = ["tp2xpp2xvpp2", "tp4xpp2+first1", "tp2xpp4xep3xetp2"]


def legacy(text: str, spec: str = "te") -> dict[str, Any]:
    """Return the options that ask a conversion for the legacy format."""
    return {"format": "torch", "layout": Layout.parse(text), "spec": spec}


def layout_for(case: str, number: int) -> str:
    """Return the next of the `LAYOUTS` that the case allows, in turn."""
    moe = CASES[case].get("moe", False)
    return LAYOUTS[number % (3 if moe else 2)]


@pytest.mark.parametrize(
    ("number", "case"), slow_except([*enumerate(CASES)], *[*enumerate(CASES)][::3]), ids=str
)
def test_there_and_back_is_bitwise(tiny: Tiny, tmp_path: Path, number: int, case: str) -> None:
    spec = ("te", "torch")[number % 2]
    choice = legacy(layout_for(case, number), spec)
    hf_to_mcore(tiny(case), tmp_path / "mcore", **choice)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert_same_tensors(tiny(case), tmp_path / "back")
    assert_same_files(tiny(case), tmp_path / "back")


@pytest.fixture(scope="module")
def mcore(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the MoE case in four files, one of which has every kind of part; read-only."""
    path = tmp_path_factory.mktemp("legacy") / "mcore"
    hf_to_mcore(tiny("moe"), path, **legacy("tp2xpp2xep2"))
    return path


FILES = {f"mp_rank_0{tp}_00{pp}_00{tp}" for tp in (0, 1) for pp in (0, 1)}


def test_the_folders_are_megatrons(mcore: Path) -> None:
    assert {folder.name for folder in (mcore / "release").iterdir()} == FILES
    assert (mcore / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_names_and_shapes_are_the_te_specs(tiny: Tiny, tmp_path: Path) -> None:
    """They equal the listing that `te_keys.py` made from Transformer Engine's modules."""
    listing = json.loads((Path(__file__).parent / "te-rank-keys.json").read_text())
    for number, (name, files) in enumerate(listing.items()):
        case, layout = name.split()
        target = tmp_path / str(number)
        hf_to_mcore(tiny(case), target, **legacy(layout))
        for folder, models in files.items():
            content = load(target / "release" / folder / "model_optim_rng.pt")
            for key, expected in models.items():
                found = {
                    name: None if value is None else list(value.shape)
                    for name, value in content[key].items()
                    if not name.startswith("visual.")
                }
                assert found == expected, f"{name} {folder} {key}"


def test_every_command_reads_it(tiny: Tiny, mcore: Path, tmp_path: Path) -> None:
    hf_to_mcore(tiny("moe"), tmp_path / "dist")
    assert compare_checkpoints(mcore, tmp_path / "dist").ok
    assert compare_checkpoints(mcore / "release", tiny("moe")).ok
    assert check_manifest(mcore).ok
    found, expected = inspect_path(mcore), inspect_path(tmp_path / "dist")
    assert (found.kind, found.iteration, found.files) == ("megatron", "release", 4)
    assert found.tensors == expected.tensors
    assert found.parameters == expected.parameters


def test_a_difference_in_one_part_is_seen(tiny: Tiny, mcore: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(mcore, tmp_path / "changed"))
    file = changed / "release" / "mp_rank_01_001_001" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.layers.1.mlp.experts.linear_fc1.weight5"][-1, -1] += 1
    torch.save(content, file)
    wrong = [f.name for f in compare_checkpoints(changed, tiny("moe")).findings if not f.ok]
    assert wrong == ["model.language_model.layers.3.mlp.experts.gate_up_proj"]
    assert not check_manifest(changed).ok


def test_the_vocabulary_is_padded_for_the_layouts_tp(tiny: Tiny, tmp_path: Path) -> None:
    hf_to_mcore(
        tiny("dense"), tmp_path / "mcore", make_vocab_size_divisible_by=100,
        **legacy("tp2"),
    )  # fmt: skip
    last = load(tmp_path / "mcore" / "release" / "mp_rank_01" / "model_optim_rng.pt")
    assert last["args"].padded_vocab_size == 400
    embedding = last["model"]["embedding.word_embeddings.weight"]
    assert embedding.shape[0] == 200
    assert embedding[:152].all()
    assert not embedding[152:].any()
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert_same_tensors(tiny("dense"), tmp_path / "back")


@pytest.mark.parametrize(
    ("case", "choice", "reason"),
    [
        ("moe", legacy("tp2xetp3"), "ETP that divides TP"),
        ("moe", legacy("tp2xep5"), "12 experts cannot be divided over EP 5"),
        ("dense", legacy("pp3"), "decoder layers cannot be divided"),
        ("dense", legacy("ep2"), "this model is dense"),
        ("dense", legacy("tp3"), "cannot be divided over TP 3"),
        ("dense", legacy("vpp2"), "PP is 1"),
        ("dense", legacy("tp2", "apex"), "not one of te, torch"),
    ],
)
def test_an_impossible_layout_is_refused(
    tiny: Tiny, case: str, choice: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadInput, match=reason):
        plan_hf_to_mcore(tiny(case), **choice)


def test_flags(tiny: Tiny, tmp_path: Path) -> None:
    def call(*flags: str) -> tuple[int, str]:
        command = ["convert", "hf-to-mcore", str(tiny("moe")), str(tmp_path / "mcore"), *flags]
        result = CliRunner().invoke(app, command)
        return result.exit_code, f"{result.output} {result.exception}"

    code, said = call("--pp", "2")
    assert code != 0
    assert "--format torch" in said
    assert not (tmp_path / "mcore").exists()
    code, _ = call("--format", "torch", "--tp", "2", "--pp", "2", "--ep", "2")
    assert code == 0
    # Megatron's own default is ETP = TP: four pairs of TP and EP ranks instead of two.
    assert len(list((tmp_path / "mcore" / "release").iterdir())) == 8


def rewrite(mcore: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Copy a checkpoint and change the content of the file in ``mp_rank_00_000_000``."""
    shutil.copytree(mcore, target)
    file = target / "release" / "mp_rank_00_000_000" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)
    return target


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "parameter lost": (lambda c: c["model"].pop(QKV), "lacks the parameter decoder.layers.1"),
    "adapter": (
        lambda c: c["model"].update({"decoder.layers.1.lora.weight": torch.ones(2)}),
        r"holds the tensor mp_rank_00_000_000/decoder.layers.1.lora.weight \[2\]",
    ),
    "other shape": (
        lambda c: c["model"].update({QKV: torch.ones(10, 48)}),
        "other ranks or layers have",
    ),
    "norm lost": (
        lambda c: c["model"].pop("decoder.layers.1.pre_mlp_layernorm.weight"),
        "holds the tensor mp_rank_01_000_001/decoder.layers.1.pre_mlp_layernorm.weight"
        "|pre_mlp_layernorm.weight do not make up the whole",
    ),
    "another layer": (
        lambda c: c["model"].update({QKV.replace("1", "2"): c["model"][QKV]}),
        "lacks the parameter decoder.layers.2",
    ),
    "quantised": (
        lambda c: c["model"].update({QKV: torch.ones(192, 48, dtype=torch.int8)}),
        "is torch.int8",
    ),
    "no arguments": (lambda c: c.pop("args"), "holds no arguments"),
    "other layout": (
        lambda c: setattr(c["args"], "pipeline_model_parallel_size", 1),
        "the name of its folder says another layout",
    ),
    "several writers": (
        lambda c: setattr(c["args"], "expert_tensor_parallel_size", 3),
        "part of the experts is lost",
    ),
    "no model": (lambda c: c.pop("model"), "holds no 'model'"),
    "a number as name": (
        lambda c: c["model"].update({7: torch.ones(2)}),
        "holds no 'model' with parameters by their names",
    ),
    "more digits than Python reads": (
        lambda c: c["model"].update({QKV.replace("1", "9" * 5000): torch.ones(2)}),
        "holds the tensor mp_rank_00_000_000/decoder.layers.999",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_does_not_fit_is_refused(mcore: Path, tmp_path: Path, change: str) -> None:
    edit, reason = CHANGES[change]
    damaged = rewrite(mcore, tmp_path / "damaged", edit)
    with pytest.raises(BadInput, match=reason):
        mcore_to_hf(damaged, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_bit_of_the_data_is_named(mcore: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(mcore, tmp_path / "damaged"))
    (damaged / "manifest.json").unlink()  # as in a checkpoint from training
    file = damaged / "release" / "mp_rank_00_000_000" / "model_optim_rng.pt"
    values = torch.load(file, weights_only=False)["model"][QKV]
    content = bytearray(file.read_bytes())
    content[content.index(values.view(torch.uint8).numpy().tobytes()) + 7] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        BadInput, match=r"a rank's part of \S+linear_qkv.weight is damaged: its CRC"
    ):
        mcore_to_hf(damaged, tmp_path / "back")


def test_a_parameter_lost_from_every_rank_is_named(mcore: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(mcore, tmp_path / "damaged"))
    for file in damaged.glob("release/mp_rank_0?_001_00?/*.pt"):
        content = torch.load(file, weights_only=False)
        del content["model"]["decoder.layers.1.pre_mlp_layernorm.weight"]
        torch.save(content, file)
    with pytest.raises(BadInput, match=r"pre_mlp_layernorm\.weight do not make up the whole"):
        plan_mcore_to_hf(damaged)  # before anything is written


@pytest.mark.parametrize("folder", sorted(FILES))
def test_a_lost_or_cut_file_is_named(mcore: Path, tmp_path: Path, folder: str) -> None:
    damaged = Path(shutil.copytree(mcore, tmp_path / "damaged"))
    file = damaged / "release" / folder / "model_optim_rng.pt"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(BadInput, match=f"{folder}.* cannot be read"):
        mcore_to_hf(damaged, tmp_path / "back")
    file.unlink()
    with pytest.raises(BadInput, match="lacks a file of TP rank"):
        mcore_to_hf(damaged, tmp_path / "back")


def test_no_code_of_a_file_is_run(mcore: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    hostile = rewrite(
        mcore, tmp_path / "hostile", lambda c: c.update(rng_state=Call(os.mkdir, str(marker)))
    )
    with pytest.raises(BadInput, match=r"asks for (posix|os)\.mkdir.*Refused"):
        mcore_to_hf(hostile, tmp_path / "back")
    assert not marker.exists()


def test_what_other_libraries_admit_is_not_admitted_here(mcore: Path, tmp_path: Path) -> None:
    marked = rewrite(mcore, tmp_path / "marked", lambda c: c.update(other=Namespace(x=Call)))
    with torch.serialization.safe_globals([Call]):
        admitted = torch.serialization.get_safe_globals()
        with pytest.raises(BadInput, match=r"asks for tests\.converters.*\.Call"):
            mcore_to_hf(marked, tmp_path / "back")
        assert set(torch.serialization.get_safe_globals()) == set(admitted)


def test_what_megatron_puts_beside_the_model_is_read(tmp_path: Path) -> None:
    """All listed types that can be made here are read, and tensors pickled in every way."""
    marked, fp32 = torch.arange(6.0).view(2, 3), torch.nn.Parameter(torch.randn(4))
    marked.tensor_model_parallel = True  # Megatron marks parameters so
    fp32.partition_dim = 0
    module = torch.nn.Linear(2, 3)  # whose state_dict() has an attribute, `_metadata`
    tensors = {
        "view": torch.arange(20).view(4, 5)[1:3, ::2],
        "marked": marked,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "parameter with attributes": fp32,
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "uint16": torch.arange(3).to(torch.uint16),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "rng": torch.get_rng_state(),
    }
    others = {
        "extra state": io.BytesIO(b"scales"),
        "numpy": np.random.get_state(),
        "bytes": b"x" * 300,
        "set": {1, "a"},
        "path": Path("a/b"),
        "signal": signal.SIGTERM,
        "nested": SimpleNamespace(a=1),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        3: [None, 1.5, (True, "text")],
    }
    args = Namespace(tensor_model_parallel_size=2, spec=["te"])
    file = tmp_path / "model_optim_rng.pt"
    torch.save({"args": args, "model": module.state_dict(), **tensors, **others}, file)
    found = load(file)
    assert found["args"] == args
    assert list(found["model"]) == ["weight", "bias"]
    assert torch.equal(found["model"]["weight"], module.weight)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        # Bytes are compared because not every dtype can be.
        assert bytes(as_bytes(found[name].detach())) == bytes(as_bytes(tensor.detach())), name
    for name in ("set", "dtype", "size", 3):
        assert found[name] == others[name]
    for name in ("extra state", "path", "signal", "nested", "device", "bytes"):
        assert isinstance(found[name], PickledObject), name


LINE = (
    '    "torch": FormatFiles("mp_rank_*/model_optim_rng.pt", "mcore_qwen3vl.converters.legacy"),\n'
)

# It imports all modules of the copy but those that need a model's or a trainer's libraries.
SCRIPT = """
import importlib, pkgutil, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import mcore_qwen3vl.converters as converters
from mcore_qwen3vl.runtime import cpu

cpu.install()
assert Path(converters.__file__).is_relative_to(sys.argv[1]), converters.__file__
modules = [m.name for m in pkgutil.walk_packages(converters.__path__, f"{converters.__name__}.")]
modules += ["mcore_qwen3vl.training.checkpoints.resume", "mcore_qwen3vl.cli.app"]
modules += ["mcore_qwen3vl.verification.checkpoints"]
for module in modules:
    importlib.import_module(module)
assert not any(".legacy" in module for module in sys.modules if "converters" in module)

from mcore_qwen3vl.cli import main
for words in COMMANDS:
    try:
        main(words)
    except SystemExit as ended:
        print("exit", ended.code)
"""


@pytest.mark.slow  # it imports everything in a copy; the test below finds the common mistake
def test_legacy_can_be_removed(tiny: Tiny, tmp_path: Path) -> None:
    product = Path(mcore_qwen3vl.__path__[0])
    tree = tmp_path / "tree" / "mcore_qwen3vl"
    ignore = shutil.ignore_patterns("__pycache__", "legacy.py")
    shutil.copytree(product, tree, ignore=ignore)
    registry = tree / "converters" / "identify.py"
    assert registry.read_text().count(LINE) == 1
    registry.write_text(registry.read_text().replace(LINE, ""))
    source, mcore, back = str(tiny("moe")), str(tmp_path / "mcore"), str(tmp_path / "back")
    commands = [
        ["convert", "hf-to-mcore", source, mcore],
        ["convert", "mcore-to-hf", mcore, back],
        ["verify", "tensors", source, back],
        ["inspect", mcore],
        ["convert", "hf-to-mcore", source, str(tmp_path / "legacy"), "--format", "torch"],
    ]
    script = SCRIPT.replace("COMMANDS", repr(commands))
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tree.parent)], capture_output=True, text=True, check=True
    )
    assert [line for line in ran.stdout.splitlines() if line.startswith("exit")] == [
        *["exit 0"] * 4,
        "exit 2",
    ], ran.stdout + ran.stderr
    message = " ".join(ran.stderr.split())
    assert "checkpoint format 'torch' is not known here; torch_dist can be written" in message
    assert not (tmp_path / "legacy").exists()


def test_nothing_outside_imports_it() -> None:
    """Nothing outside names it either, except one line of `place.FORMATS`."""
    folders = [Path(mcore_qwen3vl.__path__[0]), Path(converters.__path__[0])]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    naming = [
        (file.name, line.strip())
        for file in files
        if file.name != "legacy.py"
        for line in file.read_text().splitlines()
        if "converters.legacy" in line
    ]
    assert naming == [("identify.py", LINE.strip())]
