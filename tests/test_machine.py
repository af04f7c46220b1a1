"""What this machine has: versions that are supported, extras, and only Linux's own functions."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from mcore_qwen3vl import machine
from mcore_qwen3vl.converters.storage import disk
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.machine import usable_cores
from mcore_qwen3vl.verification.checkpoints import roundtrip
from tests.turns import slow_except

ROOT = Path(__file__).parents[1]
PINS = ROOT / "tests" / "environments"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES = PROJECT["project"]["dependencies"]


def test_nothing_is_said_of_supported_versions() -> None:
    assert list(machine.versions_outside()) == []


@pytest.mark.parametrize(
    ("package", "version"),
    [("torch", "2.10.1"), ("torch", "2.99.0"), ("transformers", "6.0.0"), ("peft", "0.1")],
)
def test_a_version_outside_is_named_with_those_inside(
    package: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(package, version, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (sentence,) = machine.versions_outside()
    assert sentence.startswith(f"{package} {version} is installed")
    declared = [*DEPENDENCIES, *PROJECT["project"]["optional-dependencies"]["lora"]]
    (asked,) = (r for r in map(Requirement, declared) if r.name == package)
    assert f"tested with {package} {asked.specifier}:" in sentence


def test_a_pre_release_of_a_container_is_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("torch", "2.14.0a0+nv26.8", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert list(machine.versions_outside()) == []


def test_a_checkout_before_the_installed_megatron_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no metadata, and those of the installed package name another version."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    numbers = "MAJOR = 0\nMINOR = 21\nPATCH = 3\nPRE_RELEASE = 'rc1'\n"
    (core / "package_info.py").write_text(numbers)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    monkeypatch.setattr(machine, "PACKAGES", ("megatron-core",))
    (sentence,) = machine.versions_outside()
    assert sentence.startswith("megatron-core 0.21.3rc1 is installed")


def test_another_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.14.1")
    (sentence,) = machine.versions_outside()
    assert sentence.startswith("Python 3.14.1 is installed")


@pytest.mark.parametrize("command", slow_except(["cli", "training"], "cli"))
def test_it_is_said_at_start(command: str, tmp_path: Path) -> None:
    """The command line says it, and the program that launch scripts start on every rank."""
    install("transformers", "6.0.0", tmp_path)
    lines = {
        "cli": "import mcore_qwen3vl.cli as cli; cli.main(['launch', 'list'])",
        "training": "from mcore_qwen3vl.training.__main__ import entry; entry()",
    }
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {lines[command]}"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.stderr.count("warning: transformers 6.0.0 is installed") == 1


def install(package: str, version: str, folder: Path) -> None:
    """Write metadata to `folder` so that on the path it says that this version is installed."""
    information = folder / f"{package}-{version}.dist-info"
    information.mkdir()
    content = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (information / "METADATA").write_text(content)


def cells() -> set[str]:
    """Return the names of the lists of pins that ``make test-versions`` runs."""
    tried = subprocess.run(
        ["make", "--dry-run", "test-versions"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(re.findall(r"^\.venv-(\S+)/bin/mcore-qwen3vl demo$", tried.stdout, re.MULTILINE))


def test_the_workflow_and_the_page_have_the_cells_of_the_makefile() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "versions.yml").read_text())
    assert set(workflow["jobs"]["cell"]["strategy"]["matrix"]["cell"]) == cells()
    page = (ROOT / "docs" / "versions.md").read_text()
    assert set(re.findall(r"^\| `([a-z]+-[0-9.]+)` \|", page, re.MULTILINE)) == cells()
    assert all((PINS / f"{cell}.txt").is_file() for cell in cells())


def test_the_pins_reach_from_end_to_end_of_what_is_supported() -> None:
    """Each pin is allowed, and every allowed minor version of torch is pinned or locked."""
    allowed = {r.name: r.specifier for r in map(Requirement, DEPENDENCIES)}
    locked = PROJECT["tool"]["uv"]["constraint-dependencies"]
    lines = [line for cell in cells() for line in (PINS / f"{cell}.txt").read_text().splitlines()]
    pins = [Requirement(line) for line in [*locked, *lines] if not line.startswith(("#", "-"))]
    for pin in pins:
        (exact,) = pin.specifier
        assert pin.name not in allowed or allowed[pin.name].contains(exact.version)
    minors = {int(next(iter(p.specifier)).version.split(".")[1]) for p in pins if p.name == "torch"}
    assert minors == {n for n in range(100) if allowed["torch"].contains(f"2.{n}.0")}


def test_the_rows_have_the_packages_that_the_tests_need() -> None:
    """Those of the group ``dev``, from which `make test` installs."""
    needed = {Requirement(text).name for text in PROJECT["dependency-groups"]["dev"]}
    lines = (PINS / "tools.txt").read_text().splitlines()
    assert needed <= {Requirement(line).name for line in lines if not line.startswith("#")}


@pytest.mark.parametrize(("package", "extra"), machine.EXTRAS.items())
def test_the_extra_is_named_and_brings_it(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.require_extra(package, "--plot")
    assert any(p.startswith(package) for p in PROJECT["project"]["optional-dependencies"][extra])
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    said = rf"--plot needs the package {package}: pip install 'mcore-qwen3vl\[{extra}\]'\."
    with pytest.raises(BadInput, match=said):
        machine.require_extra(package, "--plot")


def test_no_module_needs_one_to_be_imported() -> None:
    """Only functions import them, so that all other commands work without."""
    files = [*ROOT.glob("mcore_qwen3vl/**/*.py"), *ROOT.glob("converters/**/*.py")]
    needed = {
        (file.name, name)
        for file in files
        for node in ast.parse(file.read_text("utf-8")).body
        for name in _imported(node)
        if name.partition(".")[0] in machine.EXTRAS
    }
    assert needed == set()
    assert _imported(ast.parse("from pyarrow import parquet").body[0]) == ["pyarrow"]


def _imported(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


LINUX_ONLY = ("O_DIRECT", "sched_getaffinity", "posix_fadvise", "posix_fallocate")


@pytest.fixture
def not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate macOS's ``os``, and a system that does not know Linux's advice about memory."""
    for name in LINUX_ONLY:
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(disk, "POPULATE_READ", 9999)


def test_cores_are_those_of_this_process() -> None:
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_cores_where_processes_are_not_bound_to_them(
    not_linux: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert usable_cores() == 10
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


def test_conversion_and_its_check_need_nothing_that_only_linux_has(
    not_linux: None, moe: Path, tmp_path: Path
) -> None:
    report = roundtrip(moe, tmp_path, lambda title: nullcontext(lambda *_: None))
    assert report.ok
    assert report.findings
