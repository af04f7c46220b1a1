"""The smallest installation of docs/installation.md converts, and names what it lacks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.command import without_version
from tests.release import smallest_packages

ROOT = Path(__file__).parents[1]
IMPORTED = {
    "megatron-core": "megatron.core",
    "megatron-energon": "megatron.energon",
    "huggingface-hub": "huggingface_hub",
    "pillow": "PIL",
    "pyyaml": "yaml",
}
"""The names by which packages are imported, where they differ."""

PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{absent}.") for absent in ABSENT):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

ABSENT = sys.argv.pop(1).split(",")
sys.meta_path.insert(0, Absent())
from mcore_qwen3vl.cli import main
main()
"""


def absent() -> list[str]:
    """Return the declared dependencies that the page's commands do not install, as modules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {Requirement(r).name for r in project["dependencies"]}
    left_out = declared - {"torch", *smallest_packages()}
    assert {"megatron-core", "transformers"} < left_out
    return [IMPORTED.get(name, name) for name in sorted(left_out)]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, ",".join(absent()), *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    ran.stderr = without_version(ran.stderr)
    return ran


@pytest.mark.slow
def test_it_converts_and_compares(moe: Path, tmp_path: Path) -> None:
    for words in (
        ("convert", "hf-to-mcore", moe, tmp_path / "mcore"),
        ("convert", "mcore-to-hf", tmp_path / "mcore", tmp_path / "back"),
        ("inspect", tmp_path / "mcore"),
        ("verify", "tensors", moe, tmp_path / "back"),
        ("verify", "audit", tmp_path / "mcore", moe),
        ("verify", "roundtrip", moe),
        ("verify", "manifest", tmp_path / "mcore"),
    ):
        ran = run(*words)
        assert (ran.returncode, ran.stderr) == (0, ""), words


@pytest.mark.parametrize(
    "words", [("tiny", "model"), ("demo",), ("generate", ".", "--prompt", "Why?")]
)
def test_what_is_missing_for_a_command_is_named(words: tuple[str, ...], tmp_path: Path) -> None:
    ran = run(*words)
    assert ran.returncode == 2
    assert re.search(r"^error: this command needs (transformers|megatron)\b", ran.stderr)
