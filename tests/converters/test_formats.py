"""The legacy format is one folder and one line; everything else works without them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mcore_qwen3vl
from mcore_qwen3vl import converters

Tiny = Callable[[str], Path]
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
modules += ["mcore_qwen3vl.verify.checkpoints"]
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
    ignore = shutil.ignore_patterns("__pycache__", "legacy")
    shutil.copytree(product, tree, ignore=ignore)
    registry = tree / "converters" / "place.py"
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
        if file.parent.name != "legacy"
        for line in file.read_text().splitlines()
        if "converters.legacy" in line
    ]
    assert naming == [("place.py", LINE.strip())]
