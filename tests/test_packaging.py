"""The wheel holds the right files, and a GPU container's builds satisfy the requirements."""

import shutil
import subprocess
import sys
import tarfile
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
    """They satisfy them: pip would replace a pre-release torch that did not."""
    requirements = map(Requirement, PROJECT["project"]["dependencies"])
    (specifier,) = (r.specifier for r in requirements if r.name == name)
    assert specifier.contains(version, prereleases=True)


def test_wheel_holds_every_module_once(tmp_path):
    """The wheels of the checkout and of its source archive hold the tracked files and no others.

    Symbolic links put two folders of the checkout in the package; the archive resolves them.
    """
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    source = tmp_path / "source"
    for name in tracked:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    expected = sorted(
        name if name.startswith("mcore_qwen3vl/") else f"mcore_qwen3vl/{name}"
        for name in tracked
        if name.startswith(("mcore_qwen3vl/", "converters/", "launch/"))
        and (source / name).is_file()
    )
    deleted = source / "build" / "lib" / "mcore_qwen3vl" / "deleted.py"  # of an earlier build
    deleted.parent.mkdir(parents=True)
    deleted.touch()
    assert packed(build("wheel", source, tmp_path / "direct")) == expected
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert packed(build("wheel", unpacked, tmp_path / "indirect")) == expected


def build(kind, source, target):
    """Build the wheel or the sdist of `source` in `target`, and return its path."""
    target.mkdir(exist_ok=True)
    call = f"from setuptools.build_meta import build_{kind}; print(build_{kind}({str(target)!r}))"
    command = [sys.executable, "-c", call]
    ran = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    return target / ran.stdout.splitlines()[-1]


def packed(wheel):
    """Return the sorted names in a wheel, metadata left out and duplicates kept."""
    names = zipfile.ZipFile(wheel).namelist()
    return sorted(name for name in names if ".dist-info/" not in name)


def test_every_package_is_type_checked():
    """None of our packages is skipped or missing, which mypy would not report."""
    mypy = PROJECT["tool"]["mypy"]
    assert mypy["packages"] == ["mcore_qwen3vl"]
    assert not mypy.get("exclude")
    assert not mypy.get("ignore_errors")
    for override in mypy["overrides"]:
        assert not any(name.startswith(("mcore_qwen3vl", "*")) for name in override["module"])
