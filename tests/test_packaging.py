"""What ends up in the wheel, and that a GPU container's own builds satisfy the requirements."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.11.0a0+nv26.3"), ("torch", "2.13.0"), ("torchvision", "0.26.0a0+nv26.3")],
)
def test_container_builds_satisfy_the_requirements(name, version):
    """A pre-release torch that did not satisfy its requirement would be replaced by pip."""
    requirements = map(Requirement, PROJECT["project"]["dependencies"])
    (specifier,) = (r.specifier for r in requirements if r.name == name)
    assert specifier.contains(version, prereleases=True)


def test_wheel_holds_every_package(tmp_path):
    """`packages` is a hand-kept list: a folder left out of it would be missing once installed."""
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    for name in tracked:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {n for n in tracked if n.startswith("mcore_qwen3vl/") and not n.endswith(".md")}
    expected |= {f"mcore_qwen3vl/{n}" for n in tracked if n.startswith(("converters/", "launch/"))}
    assert expected <= packed, sorted(expected - packed)
    assert not any(name.startswith(("converters/", "tests/", "launch/")) for name in packed)
