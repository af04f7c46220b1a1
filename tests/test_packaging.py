"""Wheel and sdist hold the right files, and the smallest installation of the page converts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.command import without_version
from tests.release import archived_files, flaws, package_files, smallest_packages, tracked_names

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.11.0a0+nv26.3"), ("torch", "2.13.0"), ("torchvision", "0.26.0a0+nv26.3")],
)
def test_container_builds_satisfy_the_requirements(name, version):
    """They satisfy them: pip would replace a pre-release torch that did not."""
    requirements = map(Requirement, PROJECT["project"]["dependencies"])
    (specifier,) = (r.specifier for r in requirements if r.name == name)
    assert specifier.contains(version, prereleases=True)


def test_the_archives_hold_what_git_tracks(tmp_path):
    """A clone with what an earlier build left behind builds what its source archive builds."""
    source = tmp_path / "source"
    for name in tracked_names(ROOT):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    deleted = source / "build" / "lib" / "mcore_qwen3vl" / "deleted.py"
    deleted.parent.mkdir(parents=True)
    deleted.touch()
    package = package_files(ROOT)
    assert "mcore_qwen3vl/launch/sft_2b.sh" in package
    wheel = archived_files(build("wheel", source, tmp_path / "direct"))
    assert flaws(wheel, package) == []
    sdist = build("sdist", source, tmp_path)
    assert flaws(archived_files(sdist), package) == []
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert archived_files(build("wheel", unpacked, tmp_path / "indirect")) == wheel


def build(kind, source, target):
    """Build the wheel or the sdist of `source` in `target`, and return its path."""
    target.mkdir(exist_ok=True)
    call = f"from setuptools.build_meta import build_{kind}; print(build_{kind}({str(target)!r}))"
    command = [sys.executable, "-c", call]
    ran = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    return target / ran.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("changed", "flaw"),
    [
        ({"mcore_qwen3vl/launch/sft_2b.sh": None}, "lacks mcore_qwen3vl/launch/sft_2b.sh"),
        ({"mcore_qwen3vl/errors.py": b""}, "has another mcore_qwen3vl/errors.py"),
        ({"mcore_qwen3vl/old.py": b""}, "has mcore_qwen3vl/old.py, unknown to git"),
        ({"converters/convert.py": b""}, "has converters/convert.py, unknown to git"),
        ({"tests/test_atomic.py": b""}, "has the test tests/test_atomic.py"),
        ({"mcore_qwen3vl/conftest.py": b""}, "has the test mcore_qwen3vl/conftest.py"),
        ({"x.dist-info/LICENSE": None}, "has 0 files LICENSE and not the one of the checkout"),
        ({"x.dist-info/LICENSE": b"MIT"}, "has 1 files LICENSE and not the one of the checkout"),
    ],
)
def test_a_release_names_what_is_wrong_with_an_archive(changed, flaw):
    package = package_files(ROOT)
    archive = {**package, "x.dist-info/LICENSE": (ROOT / "LICENSE").read_bytes()}
    assert flaws(archive, package) == []
    archive = {name: c for name, c in {**archive, **changed}.items() if c is not None}
    assert flaw in flaws(archive, package)


def test_every_package_is_type_checked():
    """None of our packages is skipped or missing, which mypy would not report."""
    mypy = PROJECT["tool"]["mypy"]
    assert mypy["packages"] == ["mcore_qwen3vl"]
    assert not mypy.get("exclude")
    assert not mypy.get("ignore_errors")
    for override in mypy["overrides"]:
        assert not any(name.startswith(("mcore_qwen3vl", "*")) for name in override["module"])


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
